"""Chat templates with tools and reasoning, of our own, that behave like those in use."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.masks import loss_mask, render_with_spans
from dspark_store.sources.messages import Conversation
from dspark_store.sources.options import ChatOptions
from dspark_store.sources.rendering import Renderer

TOOLS_IN_SYSTEM = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content }}"
    "{%- else %}{{- DEFAULT }}{%- endif %}{{- '\n\n<tools>' }}{%- for tool in tools %}{{- '\n' }}"
    "{{- tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- elif DEFAULT %}"
    "{{- '<|im_start|>system\n' + DEFAULT + '<|im_end|>\n' }}{%- endif %}"
)
TOOL_RESULT = (
    "{%- elif m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}"
)
PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
CALLS = (
    "{%- for call in m.tool_calls or [] %}{%- set f = call.function %}{%- if not loop.first or m.content %}{{- '\n' }}"
    '{%- endif %}{{- \'<tool_call>\n{"name": "\' + f.name + \'", "arguments": \' }}{%- if f.arguments is string %}'
    "{{- f.arguments }}{%- else %}{{- f.arguments | tojson }}{%- endif %}{{- '}\n</tool_call>' }}{%- endfor %}"
)

# The system prompt is there by default; an answer without calls and one with them are two branches.
QWEN25 = (
    TOOLS_IN_SYSTEM.replace("DEFAULT", "'You are of help.'")
    + "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or "
    "(m.role == 'assistant' and not m.tool_calls) %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant' }}{%- if m.content %}{{- '\n' + m.content }}"
    '{%- endif %}{%- for call in m.tool_calls %}{%- set f = call.function %}{{- \'\n<tool_call>\n{"name": "\' + f.name'
    " + '\", \"arguments\": ' }}{{- f.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    + TOOL_RESULT
    + "{%- endfor %}"
    + PROMPT
)

# Reasoning stays only behind the last question, which is no result of a tool that a user passes on.
QWEN3 = (
    TOOLS_IN_SYSTEM.replace("DEFAULT", "''")
    + "{%- set ns = namespace(searching=true, last=messages|length - 1) %}{%- for m in messages[::-1] %}"
    "{%- if ns.searching and m.role == 'user' and not (m.content.startswith('<tool_response>') and "
    "m.content.endswith('</tool_response>')) %}{%- set ns.searching = false %}"
    "{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- elif m.role == 'assistant' %}"
    "{%- set why = '' %}{%- if m.reasoning_content is string %}{%- set why = m.reasoning_content %}"
    "{%- elif '</think>' in content %}{%- set why = content.split('</think>')[0].rstrip('\n').split('<think>')[-1]"
    ".lstrip('\n') %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.last and (loop.last or why) %}"
    "{{- '<think>\n' + why.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{%- else %}{{- content }}"
    "{%- endif %}"
    + CALLS.replace("m.content", "content")
    + "{{- '<|im_end|>\n' }}"
    + TOOL_RESULT
    + "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)

# Contents are trimmed, tools stand in the first question, results are JSON.
LLAMA31 = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nKnowledge: December 2023\n' + system + '<|eot_id|>' }}"
    "{%- if tools %}{%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}"
    "{{- '<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n' }}{%- for tool in tools %}"
    "{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' or m.role == 'ipython' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{%- if m.content is mapping or m.content is iterable %}"
    "{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}{{- '<|eot_id|>' }}{%- elif m.tool_calls %}"
    "{%- if m.tool_calls|length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}"
    "{%- set f = m.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{- '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{- f.arguments | tojson }}{{- '}<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)

HERMES = (
    "{{- bos_token }}"
    + TOOLS_IN_SYSTEM.replace("DEFAULT", "''")
    + "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'system' and not (tools and loop.first)) or "
    "(m.role == 'assistant' and not m.tool_calls) %}{%- if not (m.role == 'system' and loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- elif m.role == 'assistant' %}"
    "{{- '<|im_start|>assistant' }}{%- for call in m.tool_calls %}{{- '\n<tool_call>\n' + "
    "{'name': call.function.name, 'arguments': call.function.arguments} | tojson + '\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- elif m.role == 'tool' %}{%- if loop.previtem and loop.previtem.role != 'tool' %}"
    "{{- '<|im_start|>tool\n' }}{%- endif %}{{- '<tool_response>\n' + m.content }}{%- if not loop.last %}"
    "{{- '\n</tool_response>\n' }}{%- else %}{{- '\n</tool_response>' }}{%- endif %}"
    "{%- if not loop.last and loop.nextitem.role != 'tool' %}{{- '<|im_end|>' }}{%- elif loop.last %}"
    "{{- '<|im_end|>' }}{%- endif %}{%- endif %}{%- endfor %}" + PROMPT
)

# Channels; reasoning of answers that are final goes when others follow.
GPT_OSS = (
    "{{- '<|start|>system<|message|>Be of help.<|end|>' }}{%- set last = namespace(name='') %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- if m.tool_calls %}"
    "{%- set f = m.tool_calls[0].function %}"
    "{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
    "{%- endif %}{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}"
    "{{- f.arguments | tojson }}{{- '<|call|>' }}{%- set last.name = f.name %}{%- else %}"
    "{%- if loop.last and m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + "
    "'<|end|>' }}{%- endif %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{%- if loop.last and not add_generation_prompt %}{{- '<|return|>' }}{%- else %}{{- '<|end|>' }}{%- endif %}"
    "{%- endif %}{%- elif m.role == 'tool' %}{{- '<|start|>functions.' + last.name + "
    "' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}{%- else %}"
    "{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)

# A beginning in front of every question, and the system message in the last one.
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}{{- bos_token }}{%- for m in rest %}"
    "{%- if m.role == 'user' %}{{- '[INST] ' }}{%- if loop.last or loop.index0 + 2 == loop.length %}"
    "{{- system + '\n\n' if system }}{%- endif %}{{- m.content + '[/INST]' }}{%- else %}"
    "{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIALS = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
    *("<|call|>", "<|return|>"),
)


def byte_tokenizer(
    template: str, specials: Sequence[str] = SPECIALS, *, eos: str = "</s>", bos: str | None = "<s>"
) -> PreTrainedTokenizerFast:
    """Give a tokenizer of bytes and special tokens."""
    specials = list(dict.fromkeys((*specials, eos, *([bos] if bos else []))))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*specials, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


def shown(
    template: str | Renderer,
    messages: list[dict[str, JsonValue]],
    tools: list[JsonValue] | None = None,
    *,
    reasoning: bool = False,
    headers: bool = False,
    prompts: bool = False,
    **conversation: object,
) -> str:
    """Return the text of a conversation with what is supervised in `[[` and `]]`."""
    renderer = template if isinstance(template, Renderer) else Renderer(byte_tokenizer(template))
    chat = Conversation(messages, tools, **conversation)  # type: ignore[arg-type]
    options = ChatOptions(mask_reasoning_content=reasoning, mask_headers=headers, mask_generation_prompt=prompts)
    rendered = render_with_spans(renderer, chat, options)
    (tokens,) = renderer.tokenise([rendered.text])
    assert tokens.encoding is not None
    mask = loss_mask(renderer, rendered, tokens)
    said = [0] * (len(rendered.text) + 2)
    for (start, stop), inside in zip(tokens.encoding.offsets, mask.tolist(), strict=True):
        said[start + 1 : stop + 1] = [inside] * (stop - start)
    parts = []
    for place, character in enumerate([*rendered.text, ""], 1):
        edge = said[place] - said[place - 1]
        parts.append(("[[" if edge > 0 else "]]" if edge < 0 else "") + character)
    return "".join(parts)
