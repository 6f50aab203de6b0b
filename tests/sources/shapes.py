"""Shapes of the chat templates in use, each twice: as Jinja, and as the pieces that a render must consist of.

The pieces are written down here without Jinja and without the package, so that masks can be checked against them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from tests.sources.templates import byte_tokenizer

HEADER, SAID, REASONING, ENDING, OTHER = "header", "said", "reasoning", "ending", "other"

type Piece = tuple[str, str]  # kind and text
type Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A template with `§GEN` and `§END` where generation tags go, and what its render consists of.

    `ENDING` is what a template writes once behind all messages: in no tag, but part of the last message without tags.
    """

    name: str
    template: str
    pieces: Callable[[Chat], list[Piece]]
    specials: tuple[str, ...]
    eos: str
    bos: str | None = None
    folds_system: bool = False
    alternates: bool = False

    def tokenizer(self, *, tagged: bool) -> PreTrainedTokenizerFast:
        """Give a tokenizer of bytes and the shape's special tokens."""
        tags = ("{%- generation %}", "{%- endgeneration %}") if tagged else ("", "")
        template = self.template.replace("§GEN", tags[0]).replace("§END", tags[1])
        return byte_tokenizer(template, self.specials, eos=self.eos, bos=self.bos)


def turns(
    assistant: tuple[str, str, str],
    user: str,
    system: str,
    opening: str = "",
    *,
    trims: bool = False,
    default_system: str = "",
    ending: str = "",
) -> Callable[[Chat], list[Piece]]:
    """Give the pieces of a template whose every message looks the same wherever it stands.

    `assistant` is its header, what stands before the content but is generated, and what closes it.
    """
    header, lead, closer = assistant

    def pieces(chat: Chat) -> list[Piece]:
        made = [(OTHER, opening)]
        if default_system and chat[0]["role"] != "system":
            made.append((OTHER, default_system))
        for message in chat:
            content = message["content"].strip() if trims else message["content"]
            if message["role"] == "assistant":
                made += [(HEADER, header), (SAID, lead + content + closer)]
            else:
                made.append((OTHER, (user if message["role"] == "user" else system).replace("TEXT", content)))
        return [*made, (ENDING, ending)]

    return pieces


def qwen3_pieces(chat: Chat) -> list[Piece]:
    """Give the pieces of Qwen 3: reasoning is kept only behind the last question of the user."""
    made = []
    last_user = max((index for index, message in enumerate(chat) if message["role"] == "user"), default=-1)
    for index, message in enumerate(chat):
        content = message["content"]
        if message["role"] != "assistant":
            made.append((OTHER, f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"))
            continue
        made.append((HEADER, "<|im_start|>assistant\n"))
        reasoning = message.get("reasoning_content", "").strip("\n")
        if index > last_user and (index == len(chat) - 1 or reasoning):
            made += [(SAID, "<think>\n"), (REASONING, reasoning), (SAID, "\n</think>\n\n")]
            content = content.lstrip("\n")
        made.append((SAID, f"{content}<|im_end|>\n"))
    return made


def olmo_pieces(chat: Chat) -> list[Piece]:
    """Give the pieces of OLMo: a line ends behind an answer only if something follows."""
    made: list[Piece] = [(OTHER, "<|endoftext|>")]
    for index, message in enumerate(chat):
        if message["role"] != "assistant":
            made.append((OTHER, f"<|{message['role']}|>\n{message['content']}\n"))
            continue
        made += [(HEADER, "<|assistant|>\n"), (SAID, f"{message['content']}<|endoftext|>")]
        if index + 1 < len(chat):
            made.append((OTHER, "\n"))
    return made


_EACH = "{%- for m in messages %}{%- set text = m['content'] %}"
_PROMPT = "{%- if add_generation_prompt %}{{- PROMPT }}{%- endif %}"
_ALTERNATE = (
    "{%- for m in messages %}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}"
)


def _prompt(text: str) -> str:
    return _PROMPT.replace("PROMPT", repr(text))


def _roles(header: str, closer: str, opening: str = "", assistant: str = "assistant", trim: str = "") -> str:
    """Write a template in which all roles look alike; `ROLE` in the header is the role's name."""
    before, _, after = header.partition("ROLE")
    role = f"('{assistant}' if m['role'] == 'assistant' else m['role'])"
    return (
        f"{{{{- {opening!r} }}}}{_EACH}{{{{- {before!r} + {role} + {after!r} }}}}"
        f"{{%- if m['role'] == 'assistant' %}}§GEN{{{{- text{trim} + {closer!r} }}}}§END"
        f"{{%- else %}}{{{{- text{trim} + {closer!r} }}}}{{%- endif %}}{{%- endfor %}}"
        f"{_prompt(header.replace('ROLE', assistant))}"
    )


def _alike(
    name: str,
    header: str,
    closer: str,
    specials: tuple[str, ...],
    eos: str,
    opening: str = "",
    *,
    before: str = "",
    assistant: str = "assistant",
    trims: bool = False,
    default_system: str = "",
    **more: bool,
) -> Shape:
    """Give the shape whose roles look alike: a header with `ROLE`, the content, and what closes it."""
    template = _roles(header, closer, opening, assistant, ".strip()" if trims else "")
    if default_system:
        template = f"{{%- if messages[0]['role'] != 'system' %}}{{{{- {default_system!r} }}}}{{%- endif %}}" + template
    user, system = (header.replace("ROLE", role) + "TEXT" + closer for role in ("user", "system"))
    said = (header.replace("ROLE", assistant), "", closer)
    pieces = turns(said, user, system, opening, trims=trims, default_system=default_system)
    return Shape(name, before + template, pieces, specials, eos, opening or None, **more)


_QWEN3 = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m['role'] == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    + _EACH
    + "{%- if m['role'] != 'assistant' %}{{- '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{%- else %}"
    "{%- set why = m['reasoning_content'] if m['reasoning_content'] is string else '' %}"
    "{%- if '</think>' in text %}{%- set why = text.split('</think>')[0].split('<think>')[-1] %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}§GEN"
    "{%- if loop.index0 > ns.last and (loop.last or why) %}"
    "{{- '<think>\n' + why.strip('\n') + '\n</think>\n\n' + text.lstrip('\n') }}{%- else %}{{- text }}{%- endif %}"
    "{{- '<|im_end|>\n' }}§END{%- endif %}{%- endfor %}" + _prompt("<|im_start|>assistant\n")
)
_MISTRAL = (
    "{{- bos_token }}" + _ALTERNATE + _EACH + "{%- if m['role'] == 'user' %}{{- '[INST] ' + text + ' [/INST]' }}"
    "{%- else %}§GEN{{- ' ' + text + eos_token }}§END{%- endif %}{%- endfor %}"
)
_DEEPSEEK = (
    "{{- bos_token }}" + _EACH + "{%- if m['role'] == 'system' %}{{- text }}"
    "{%- elif m['role'] == 'user' %}{{- '<｜User｜>' + text }}"  # noqa: RUF001 - the model's own characters
    "{%- else %}{{- '<｜Assistant｜>' }}§GEN{{- text + eos_token }}§END{%- endif %}{%- endfor %}"  # noqa: RUF001
     + _prompt("<｜Assistant｜>")  # noqa: RUF001
)
_PHI = (
    _roles("<|ROLE|>\n", "<|end|>\n").removesuffix(_prompt("<|assistant|>\n"))
    + "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- else %}{{- eos_token }}{%- endif %}"
)
_GLM = (
    "{{- '[gMASK]<sop>' }}"
    + _EACH
    + "{%- if m['role'] == 'assistant' %}{{- '<|assistant|>' }}§GEN{{- '\n' + text }}§END"
    "{%- else %}{{- '<|' + m['role'] + '|>\n' + text }}{%- endif %}{%- endfor %}" + _prompt("<|assistant|>")
)
_COMMAND_R = (
    "{{- bos_token }}" + _EACH + "{{- '<|START_OF_TURN_TOKEN|>' + {'system': '<|SYSTEM_TOKEN|>', 'user': "
    "'<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[m['role']] }}{%- set shown = text.strip() + "
    "'<|END_OF_TURN_TOKEN|>' %}{%- if m['role'] == 'assistant' %}§GEN{{- shown }}§END{%- else %}"
    "{{- shown }}{%- endif %}"
    "{%- endfor %}" + _prompt("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>")
)
_GRANITE_SYSTEM = "<|start_of_role|>system<|end_of_role|>You are Granite.<|end_of_text|>\n"
_OLMO = (
    "{{- bos_token }}"
    + _EACH
    + "{%- if m['role'] == 'assistant' %}{{- '<|assistant|>\n' }}§GEN{{- text + eos_token }}§END"
    "{%- if not loop.last %}{{- '\n' }}{%- endif %}{%- else %}"
    "{{- '<|' + m['role'] + '|>\n' + text + '\n' }}{%- endif %}"
    "{%- endfor %}" + _prompt("<|assistant|>\n")
)
_IM = ("<|im_start|>", "<|im_end|>")

SHAPES = (
    _alike("ChatML", "<|im_start|>ROLE\n", "<|im_end|>\n", _IM, "<|im_end|>"),
    _alike(
        "Llama 3",
        "<|start_header_id|>ROLE<|end_header_id|>\n\n",
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
        "<|eot_id|>",
        "<|begin_of_text|>",
        trims=True,
    ),
    _alike(
        "Gemma",
        "<start_of_turn>ROLE\n",
        "<end_of_turn>\n",
        ("<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        "<bos>",
        before=_ALTERNATE,
        assistant="model",
        trims=True,
        folds_system=True,
        alternates=True,
    ),
    Shape(
        "Mistral",
        _MISTRAL,
        turns(("", " ", "</s>"), "[INST] TEXT [/INST]", "", "<s>"),
        (),
        "</s>",
        "<s>",
        folds_system=True,
        alternates=True,
    ),
    Shape("Qwen 3", _QWEN3, qwen3_pieces, _IM, "<|im_end|>"),
    Shape(
        "DeepSeek",
        _DEEPSEEK,
        turns(
            ("<｜Assistant｜>", "", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
            "<｜User｜>TEXT",  # noqa: RUF001
            "TEXT",
            "<｜begin▁of▁sentence｜>",  # noqa: RUF001
        ),
        ("<｜User｜>", "<｜Assistant｜>"),  # noqa: RUF001
        "<｜end▁of▁sentence｜>",  # noqa: RUF001
        "<｜begin▁of▁sentence｜>",  # noqa: RUF001
    ),
    Shape(
        "Phi 3",
        _PHI,
        turns(
            ("<|assistant|>\n", "", "<|end|>\n"),
            "<|user|>\nTEXT<|end|>\n",
            "<|system|>\nTEXT<|end|>\n",
            ending="<|endoftext|>",
        ),
        ("<|user|>", "<|assistant|>", "<|end|>"),
        "<|endoftext|>",
    ),
    Shape(
        "GLM 4",
        _GLM,
        turns(("<|assistant|>", "\n", ""), "<|user|>\nTEXT", "<|system|>\nTEXT", "[gMASK]<sop>"),
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>"),
        "<|endoftext|>",
    ),
    Shape(
        "Command R",
        _COMMAND_R,
        turns(
            ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "", "<|END_OF_TURN_TOKEN|>"),
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>TEXT<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>TEXT<|END_OF_TURN_TOKEN|>",
            "<BOS_TOKEN>",
            trims=True,
        ),
        ("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>"),
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
    ),
    _alike(
        "Granite",
        "<|start_of_role|>ROLE<|end_of_role|>",
        "<|end_of_text|>\n",
        ("<|start_of_role|>", "<|end_of_role|>"),
        "<|end_of_text|>",
        default_system=_GRANITE_SYSTEM,
    ),
    Shape("OLMo", _OLMO, olmo_pieces, (), "<|endoftext|>", "<|endoftext|>"),
    _alike("Zephyr", "<|ROLE|>\n", "</s>\n", (), "</s>"),
)
