"""A decode server with tool calls in Hermes format and reasoning in Qwen3 format. Its template has the variables of
Qwen3 and DeepSeek.
"""

import json
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr

from pdserve.configs.schema import DecodeConfig
from pdserve.models.loading.catalog import locate_model
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.http_harness import RunningServer, running_server, write_byte_model

TEMPLATE = (
    "{% if tools %}tools: {{ tools | map(attribute='function.name') | join(',') }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function.name + ' ' + call.function.arguments }} {{ call.id }}"
    "</tool_call>{% endfor %}{% if m.tool_call_id %} ({{ m.tool_call_id }}){% endif %}"
    "{% if m.reasoning_content %} ~{{ m.reasoning_content }}~{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>\n{% endif %}"
    "{% if thinking is defined and not thinking %}</think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tools_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = write_byte_model(tmp_path_factory.mktemp("tools"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return load_tokenizer(locate_model(str(directory)))


@pytest.fixture
async def server(tools_tokenizer: Tokenizer) -> AsyncIterator[RunningServer]:
    async with running_server(tools_tokenizer, DecodeConfig(api_key=SecretStr("right"))) as running:
        yield running
