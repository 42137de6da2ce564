"""One task by one client package, in a Python of its own: `python client_program.py CLIENT TASK URL`; prints JSON.

The server answers the tasks chat, stream and responses with a text, parse with {"name": "Ghent", "people": 3}, tools
with a call of weather(city="Ghent"), and embed with vectors.
"""

import json
import sys

from pydantic import BaseModel

ASK = "What colour is the lighthouse?"


class City(BaseModel):
    """A city."""

    name: str
    people: int


class weather(BaseModel):
    """Tells the weather."""

    city: str


def langchain(task, url):
    """ChatOpenAI and OpenAIEmbeddings of langchain-openai."""
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    if task == "embed":
        made = OpenAIEmbeddings(model="fake-encoder", base_url=url, api_key="x", check_embedding_ctx_length=False)
        return made.embed_documents(["a", "abc"])
    chat = ChatOpenAI(model="fake", base_url=url, api_key="x", use_responses_api=task == "responses")
    if task == "responses":
        return "".join(chunk.text for chunk in chat.stream(ASK))
    if task == "chat":
        return chat.invoke(ASK).content
    if task == "stream":
        return "".join(chunk.content for chunk in chat.stream(ASK))
    if task == "parse":
        return chat.with_structured_output(City).invoke(ASK).model_dump()
    return chat.bind_tools([weather]).invoke(ASK).tool_calls[0]["args"]


def pydantic_ai(task, url):
    """Agent of pydantic-ai."""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key="x")
    if task == "responses":
        from pydantic_ai.models.openai import OpenAIResponsesModel

        return Agent(OpenAIResponsesModel("fake", provider=provider)).run_sync(ASK).output
    model = OpenAIChatModel("fake", provider=provider)
    if task == "chat":
        return Agent(model).run_sync(ASK).output
    if task == "stream":
        import asyncio

        async def run():
            async with Agent(model).run_stream(ASK) as result:
                return await result.get_output()

        return asyncio.run(run())
    if task == "parse":
        return Agent(model, output_type=NativeOutput(City)).run_sync(ASK).output.model_dump()
    from pydantic_ai import ToolOutput

    return Agent(model, output_type=ToolOutput(weather, name="weather")).run_sync(ASK).output.model_dump()


def instructor(task, url):
    """Instructor over openai, by tools and by JSON Schema."""
    import instructor as package
    from openai import OpenAI

    mode = package.Mode.TOOLS if task == "tools" else package.Mode.JSON_SCHEMA
    client = package.from_openai(OpenAI(base_url=url, api_key="x"), mode=mode)
    model = weather if task == "tools" else City
    asked = [{"role": "user", "content": ASK}]
    return client.chat.completions.create(model="fake", messages=asked, response_model=model).model_dump()


def litellm(task, url):
    """The completion and embedding functions of litellm."""
    import litellm as package

    asked = {"api_base": url, "api_key": "x"}
    if task == "embed":
        found = package.embedding(model="openai/fake-encoder", input=["a", "abc"], **asked)
        return [entry["embedding"] for entry in found.data]
    if task == "responses":
        return package.responses(model="openai/fake", input=ASK, **asked).output[0].content[0].text
    asked |= {"model": "openai/fake", "messages": [{"role": "user", "content": ASK}]}
    if task == "chat":
        return package.completion(**asked).choices[0].message.content
    if task == "stream":
        return "".join(chunk.choices[0].delta.content or "" for chunk in package.completion(**asked, stream=True))
    if task == "parse":
        return json.loads(package.completion(**asked, response_format=City).choices[0].message.content)
    function = {"name": "weather", "parameters": weather.model_json_schema()}
    answer = package.completion(**asked, tools=[{"type": "function", "function": function}])
    return json.loads(answer.choices[0].message.tool_calls[0].function.arguments)


def llama_index(task, url):
    """OpenAILike of llama-index."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    made = OpenAILike(
        model="fake", api_base=url, api_key="x", is_chat_model=True, is_function_calling_model=True, context_window=4096
    )
    asked = [ChatMessage(role="user", content=ASK)]
    if task == "chat":
        return made.chat(asked).message.content
    if task == "stream":
        return "".join(chunk.delta or "" for chunk in made.stream_chat(asked))
    if task == "embed":
        from llama_index.embeddings.openai_like import OpenAILikeEmbedding

        embedding = OpenAILikeEmbedding(model_name="fake-encoder", api_base=url, api_key="x")
        return embedding.get_text_embedding_batch(["a", "abc"])
    if task == "parse":
        made.should_use_structured_outputs = True
        return made.as_structured_llm(City).chat(asked).raw.model_dump()
    tool = FunctionTool.from_defaults(fn=lambda city: city, name="weather", fn_schema=weather)
    answer = made.chat_with_tools([tool], user_msg=ASK)
    return made.get_tool_calls_from_response(answer)[0].tool_kwargs


def haystack(task, url):
    """OpenAIChatGenerator and OpenAIDocumentEmbedder of haystack-ai."""
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    given = {"api_key": Secret.from_token("x"), "api_base_url": url}
    if task == "embed":
        embedder = OpenAIDocumentEmbedder(model="fake-encoder", progress_bar=False, **given)
        found = embedder.run([Document(content="a"), Document(content="abc")])
        return [document.embedding for document in found["documents"]]
    chat, asked, said = OpenAIChatGenerator(model="fake", **given), [ChatMessage.from_user(ASK)], []
    if task == "chat":
        return chat.run(asked)["replies"][0].text
    if task == "stream":
        chat.run(asked, streaming_callback=lambda chunk: said.append(chunk.content))
        return "".join(said)
    if task == "parse":
        return json.loads(chat.run(asked, generation_kwargs={"response_format": City})["replies"][0].text)
    schema = weather.model_json_schema()
    tool = Tool(name="weather", description="Tells the weather.", parameters=schema, function=lambda city: city)
    return chat.run(asked, tools=[tool])["replies"][0].tool_calls[0].arguments


def openai(task, url):
    """OpenAI's own client."""
    from openai import OpenAI, pydantic_function_tool

    client = OpenAI(base_url=url, api_key="x")
    asked = {"model": "fake", "messages": [{"role": "user", "content": ASK}]}
    if task == "chat":
        return client.chat.completions.create(**asked).choices[0].message.content
    if task == "stream":
        return "".join(
            chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
        )
    if task == "embed":
        found = client.embeddings.create(model="fake-encoder", input=["a", "abc"])
        return [entry.embedding for entry in found.data]
    if task == "parse":
        return client.chat.completions.parse(**asked, response_format=City).choices[0].message.parsed.model_dump()
    if task == "responses":
        first = client.responses.create(model="fake", input=ASK)
        second = client.responses.create(model="fake", input=ASK, previous_response_id=first.id)
        said = client.responses.retrieve(second.id).output_text
        client.responses.delete(first.id)
        return said
    answer = client.chat.completions.parse(**asked, tools=[pydantic_function_tool(weather)])
    return answer.choices[0].message.tool_calls[0].function.parsed_arguments.model_dump()


def agents(task, url):
    """Agents of openai-agents, over responses that the server keeps."""
    from agents import Agent, Runner, StopAtTools, function_tool, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=url, api_key="x"))
    called = []

    @function_tool(name_override="weather")
    def look(city: str) -> str:
        called.append(city)
        return "rain"

    if task == "tools":
        stop = StopAtTools(stop_at_tool_names=["weather"])
        done = Runner.run_sync(Agent(name="a", model="fake", tools=[look], tool_use_behavior=stop), ASK)
        assert done.final_output == "rain"
        return {"city": called[0]}
    agent = Agent(name="a", model="fake")
    first = Runner.run_sync(agent, ASK)
    return Runner.run_sync(agent, ASK, previous_response_id=first.last_response_id).final_output


def anthropic(task, url):
    """The client of Anthropic's Messages API."""
    from anthropic import Anthropic

    client = Anthropic(base_url=url.removesuffix("/v1"), api_key="x")
    asked = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": ASK}]}
    tool = {"name": "weather", "description": "Tells the weather.", "input_schema": weather.model_json_schema()}
    if task == "chat":
        assert client.messages.count_tokens(model="fake", messages=asked["messages"]).input_tokens == 5
        return client.messages.create(**asked).content[0].text
    if task == "stream":
        with client.messages.stream(**asked) as stream:
            said = "".join(stream.text_stream)
            assert stream.get_final_message().stop_reason == "end_turn"
        return said
    with client.messages.stream(**asked, tools=[{**tool, "cache_control": {"type": "ephemeral"}}]) as stream:
        streamed = stream.get_final_message()
    whole = client.messages.create(**asked, tools=[tool], tool_choice={"type": "any"})
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.content[0].input == whole.content[0].input
    return whole.content[0].input


if __name__ == "__main__":
    client, task, url = sys.argv[1:]
    print(json.dumps(globals()[client](task, url)))
