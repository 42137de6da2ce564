"""LangChain over FAISS, in a Python of its own: `python stuff_program.py CHAIN URL < documents.json`.

It asks three questions whose passages come in three orders, and prints the `cached_tokens` of each answer as JSON.
"""

import json
import sys

QUESTIONS = ("Who built the harbour of Orlan?", "What does the bakery sell?", "Who tends the lamp on the hill?")
NEEDS = "import faiss, langchain_community, langchain_core, langchain_openai"


def main(chain: str, url: str, documents: list[str]) -> list[int]:
    """The chain "stuff" has everything in the user's message, "system" has passages in the system message."""
    from langchain_community.vectorstores import FAISS
    from langchain_core.documents import Document
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    encoder = OpenAIEmbeddings(model="all-minilm-l6-v2", base_url=url, api_key="x", check_embedding_ctx_length=False)
    found = FAISS.from_documents([Document(text) for text in documents], encoder).as_retriever()
    templates = {
        "stuff": [("user", "Use these pieces of context.\n\n{context}\n\nQuestion: {question}\nHelpful Answer:")],
        "system": [("system", "Use these pieces of context.\n\n{context}"), ("user", "{question}")],
    }
    model = ChatOpenAI(model="tiny", base_url=url, api_key="x", max_tokens=2)
    asked = ChatPromptTemplate.from_messages(templates[chain]) | model
    cached = []
    for question in QUESTIONS:
        context = "\n\n".join(document.page_content for document in found.invoke(question))
        answer = asked.invoke({"context": context, "question": question})
        cached.append(answer.usage_metadata["input_token_details"]["cache_read"])
    return cached


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], json.load(sys.stdin))))
