"""Tool calling with client libraries: `python program.py URL CHECK`, in an environment that has the libraries.

A check exits with a traceback if the library does not get the reply that it expects. This file imports nothing of
pdserve.
"""

import asyncio
import json
import sys
from typing import Any, Literal

import pydantic

QUESTION = "What is the weather in Rome for the next 3 days?"


class Weather(pydantic.BaseModel):
    """Get the weather of a city."""

    city: Literal["Paris", "Rome"]
    days: int = pydantic.Field(ge=1, le=7)


def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Get the weather of a city."""
    return f"sunny in {city} for {days} days"


def langchain(url: str) -> None:
    """`with_structured_output`, and `bind_tools` whole, streamed and asynchronous."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="any", temperature=0, max_retries=0, max_tokens=120)
    for method in ("json_schema", "function_calling"):
        parsed = chat.with_structured_output(Weather, method=method).invoke(QUESTION)
        assert isinstance(parsed, Weather), (method, parsed)
    required = chat.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
    whole = required.invoke(QUESTION)
    Weather.model_validate(whole.tool_calls[0]["args"])
    merged: Any = None
    for chunk in required.stream(QUESTION):
        merged = chunk if merged is None else merged + chunk
    assert merged.tool_calls[0]["args"] == whole.tool_calls[0]["args"], (
        "greedy sampling: the stream has the same arguments"
    )
    again = asyncio.run(chat.bind_tools([Weather], tool_choice="Weather").ainvoke(QUESTION))
    Weather.model_validate(again.tool_calls[0]["args"])
    result = ToolMessage("Sunny, 25 degrees.", tool_call_id=whole.tool_calls[0]["id"])
    answer = chat.bind_tools([Weather]).invoke([HumanMessage(QUESTION), whole, result])
    assert answer.content or answer.tool_calls


def litellm(url: str) -> None:
    """`completion` with tools, whole and streamed."""
    import litellm as library

    schema = {"name": "Weather", "description": "Get the weather", "parameters": Weather.model_json_schema()}
    asked: dict[str, Any] = {
        "model": "openai/any",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"type": "function", "function": schema}],
        "tool_choice": {"type": "function", "function": {"name": "Weather"}},
        "temperature": 0,
        "max_tokens": 120,
        "timeout": 600,
    }
    whole: Any = library.completion(**asked)
    assert whole.choices[0].finish_reason == "tool_calls"
    arguments = whole.choices[0].message.tool_calls[0].function.arguments
    Weather.model_validate_json(arguments)
    built: Any = library.stream_chunk_builder(list(library.completion(**asked, stream=True)))
    assert json.loads(built.choices[0].message.tool_calls[0].function.arguments) == json.loads(arguments)


def llama_index(url: str) -> None:
    """`chat_with_tools` and `stream_chat_with_tools` call a function."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model="any",
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=120,
        max_retries=0,
        timeout=600,
    )
    tool = FunctionTool.from_defaults(fn=get_weather)
    history = [ChatMessage(role="user", content=QUESTION)]
    reply = llm.chat_with_tools([tool], chat_history=history, tool_required=True)
    calls = llm.get_tool_calls_from_response(reply)
    assert tool(**calls[0].tool_kwargs).raw_output.startswith("sunny in"), calls
    streamed = list(llm.stream_chat_with_tools([tool], chat_history=history, tool_required=True))[-1]
    assert llm.get_tool_calls_from_response(streamed)[0].tool_kwargs == calls[0].tool_kwargs


CHECKS = {check.__name__: check for check in (langchain, litellm, llama_index)}

if __name__ == "__main__":
    CHECKS[sys.argv[2]](sys.argv[1])
