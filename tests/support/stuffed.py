"""Documents, and messages that RAG programs stuff them into."""

from collections.abc import Callable, Sequence

HARBOUR = "The harbour of Orlan was built by Ida Quell. " * 5
BAKERY = "The bakery of Marn sells rye bread and plum cake. " * 5
TOWER = "The tower on the hill has a lamp that Ann tends. " * 5
DOCUMENTS = [text.strip() for text in (HARBOUR, BAKERY, TOWER)]

PROMPTS: dict[str, Callable[[Sequence[str]], str]] = {
    "stuff": lambda docs: "Use these pieces.\n\n" + "\n\n".join(docs) + "\n\nQuestion: Who?\nHelpful Answer:",
    "one line each": lambda docs: "Question: Who? \nContext: " + "\n\n".join(docs) + " \nAnswer:",
    "numbered": lambda docs: "\n".join(f"[{n}] {doc}" for n, doc in enumerate(docs, 1)) + "\n\nWho?",
    "ordinals": lambda docs: "\n\n".join(f"{n}. {doc}" for n, doc in enumerate(docs, 1)) + "\n\nWho?",
    "labels": lambda docs: "".join(f"Document {n}:\n{doc}\n" for n, doc in enumerate(docs, 1)) + "Question: Who?",
    "tags": lambda docs: "<docs>\n" + "".join(f"<doc>\n{doc}\n</doc>\n" for doc in docs) + "</docs>\nWho?",
    "rules": lambda docs: "\n---\n".join(docs) + "\n---\nWho?",
    "windows": lambda docs: "\r\n\r\n".join(docs) + "\r\n\r\nWho?",
    "question first": lambda docs: "Who?\n\n" + "\n\n".join(docs) + "\n\nAnswer briefly.",
}
