"""Tokenising chats into samples against the tokenizer library's own batched rate.

    python -m benchmarks.tokenise [--chats 200000] [--workers 2] [--tokenizer DIRECTORY]

Rates are of the clock and of the processor: the second hardly depends on what else the machine does. The library's
rate is that of one call a thousand texts that are rendered already, on as many threads as there are
workers. Ours goes from a JSONL file to ids and masks: parsing, rendering, finding what the assistant said. A long trace
with tools is measured apart.
"""

import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.flags import parsed
from benchmarks.tables import Column, PeerComparison, Recorder, Table
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.chat import ChatSource
from dspark_store.sources.masks import tokens_and_mask
from dspark_store.sources.messages import Conversation, Message
from dspark_store.sources.options import DEFAULT_OPTIONS, ChatOptions
from dspark_store.sources.rendering import Renderer

SPECIALS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}TAG"
    "{{ m['content'] + '<|im_end|>\n' }}ENDTAG{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRACES = (
    "{% for m in messages %}{{ '<|im_start|>' + ('user' if m['role'] == 'tool' else m['role']) + '\n' }}"
    "{% if m['reasoning_content'] %}{{ '<think>\n' + m['reasoning_content'] + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] }}{% for call in m['tool_calls'] or [] %}{{ '\n<tool_call>\n' }}"
    "{{ call['function'] | tojson }}{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS_OF_A_TRACE = 200
TEXTS_A_CALL = 1000
FEWEST, MOST = 20, 160  # words of an answer
VOCABULARY = 30_000


def words(count: int, generator: random.Random) -> list[str]:
    """Make up words of two to five syllables."""
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]
    return ["".join(generator.choices(syllables, k=generator.randint(2, 5))) for _ in range(count)]


def chats(count: int, generator: random.Random) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Make up conversations of one to four turns; common words are much more frequent than rare ones."""
    vocabulary = words(20_000, generator)
    weights = [1 / (rank + 5) for rank in range(len(vocabulary))]
    stream = generator.choices(vocabulary, weights, k=2_000_000)

    def sentence(fewest: int, most: int) -> str:
        start = generator.randrange(len(stream) - most)
        return " ".join(stream[start : start + generator.randint(fewest, most)])

    for _ in range(count):
        messages = []
        for _ in range(generator.randint(1, 4)):
            messages.append({"role": "user", "content": sentence(5, 40)})
            messages.append({"role": "assistant", "content": sentence(FEWEST, MOST)})
        yield {"messages": messages}


def trace(turns: int, generator: random.Random) -> list[Message]:
    """Make up a conversation in which the assistant reasons and calls a tool at every turn."""
    vocabulary = words(5_000, generator)

    def text(count: int) -> str:
        return " ".join(generator.choices(vocabulary, k=count))

    messages: list[Message] = [{"role": "user", "content": text(40)}]
    for turn in range(turns):
        function: JsonValue = {"name": generator.choice(["find", "edit"]), "arguments": {"path": text(2), "line": turn}}
        calls: JsonValue = [{"id": "call_0", "type": "function", "function": function}]
        why = text(30)
        messages.append({"role": "assistant", "content": "", "reasoning_content": why, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": text(60)})
    return [*messages, {"role": "assistant", "content": text(40)}]


def trace_table(tokenizer: PreTrainedTokenizerBase) -> Table:
    """Return the processor time of a trace from messages to ids and masks, beside that of rendering it once."""
    tokenizer.chat_template = TRACES
    messages = trace(TURNS_OF_A_TRACE, random.Random(2))
    renderer = Renderer(tokenizer)
    renderer.tokenise([renderer.render(messages, None)])
    start = time.process_time()
    (tokens,) = renderer.tokenise([renderer.render(messages, None)])
    once = time.process_time() - start
    rows: list[tuple[str, float, float]] = [("rendered and tokenised once", once * 1e3, 1.0)]
    for options in (DEFAULT_OPTIONS, ChatOptions(mask_reasoning_content=True)):
        renderer = Renderer(tokenizer)  # one that has seen no conversation before
        start = time.process_time()
        tokens_and_mask(renderer, Conversation(messages, None), options)
        spent = time.process_time() - start
        name = "ids and masks" + (", reasoning masked" if options.mask_reasoning_content else "")
        rows.append((name, spent * 1e3, spent / once))
    columns = (Column("trace"), Column("processor ms", ",.0f"), Column("ratio", ".2f"))
    note = f"{TURNS_OF_A_TRACE} turns with a tool, {len(tokens.ids):,} tokens, no generation tags."
    return Table("A long trace", columns, tuple(rows), (note,), ())


def trained_tokenizer(texts: Iterator[str], *, tagged: bool) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
        ),
    )
    made: Any = PreTrainedTokenizerFast  # its constructor is not annotated
    tokenizer: PreTrainedTokenizerFast = made(tokenizer_object=backend, eos_token="<|im_end|>")
    begin, end = ("{% generation %}", "{% endgeneration %}") if tagged else ("", "")
    tokenizer.chat_template = TEMPLATE.replace("ENDTAG", end).replace("TAG", begin)
    return tokenizer


@dataclass(frozen=True, slots=True)
class Rate:
    """Chats per second of the clock, and per second of processor time of all processes and threads."""

    clock: float
    processor: float


def library_rate(tokenizer: PreTrainedTokenizerBase, path: Path, sample: int) -> Rate:
    """Return the rate of the library alone, over the first `sample` chats."""
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line)["messages"] for line, _ in zip(file, range(sample), strict=False)]
    texts = [str(tokenizer.apply_chat_template(messages, tokenize=False)) for messages in rows]
    tokenizer(texts[:TEXTS_A_CALL], add_special_tokens=False)
    start, busy = time.perf_counter(), time.process_time()
    for call in batched(texts, TEXTS_A_CALL):
        tokenizer(list(call), add_special_tokens=False, verbose=False)
    return Rate(len(texts) / (time.perf_counter() - start), len(texts) / (time.process_time() - busy))


def our_rate(tokenizer: PreTrainedTokenizerBase, path: Path, workers: int) -> tuple[Rate, float, list[int]]:
    """Return the rate between the third and the ninth tenth of a source, and that of all with the start of workers.

    And the memory of this process and its workers, in bytes, at every tenth.
    """
    source = ChatSource(path, tokenizer, seq_length=2048, shuffle_seed=42, num_workers=workers)
    tenth = len(source) // 10
    marks: list[tuple[float, float]] = []
    memory = []
    begun = time.perf_counter()
    for count, _ in enumerate(source.read(), 1):
        if count % tenth == 0:
            marks.append((time.perf_counter(), busy_seconds()))
            memory.append(resident())
    whole = len(source) / (time.perf_counter() - begun)
    clock, processor = (last - first for first, last in zip(marks[2], marks[8], strict=True))
    return Rate(6 * tenth / clock, 6 * tenth / processor), whole, memory


def busy_seconds() -> float:
    """Return the processor time of this process and its children."""
    total = time.process_time()
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def resident() -> int:
    """Return the memory of this process and of its children, in bytes."""
    children = [child.pid for child in multiprocessing.active_children()]
    fields = [Path(f"/proc/{pid}/statm").read_text().split() for pid in (os.getpid(), *children)]
    return sum((int(field[1]) - int(field[2])) * os.sysconf("SC_PAGE_SIZE") for field in fields)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    given = parsed("tokenise", arguments)
    recorder = Recorder("tokenise", arguments)
    os.environ.setdefault("RAYON_NUM_THREADS", str(given.workers))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in chats(given.chats, random.Random(0)))
        if given.tokenizer:
            tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
        else:
            texts = (message["content"] for row in chats(5_000, random.Random(1)) for message in row["messages"])
            tokenizer = trained_tokenizer(texts, tagged=not given.untagged)
        library = library_rate(tokenizer, path, min(given.chats, 20_000))
        ours, whole, memory = our_rate(tokenizer, path, given.workers)
    recorder.describe(f"{given.chats:,} chats, {given.workers} processes")
    recorder.add(tokenise_table(library, ours, whole, memory))
    recorder.add(trace_table(tokenizer))
    recorder.save(given.json)
    return 0


def tokenise_table(library: Rate, ours: Rate, whole: float, memory: Sequence[int]) -> Table:
    """Return both rates, and the memory of all processes."""
    units, us = ("a second", "a processor second"), "from the file to ids and masks"
    columns = (Column("chats"), *(Column(unit, ",.0f") for unit in units))
    ratios = (ours.clock / library.clock, ours.processor / library.processor)
    rows = (("the library alone", library.clock, library.processor), (us, ours.clock, ours.processor))
    notes = (
        f"Ratios {ratios[0]:.2f} and {ratios[1]:.2f}; with the start of the processes, {whole:,.0f} chats per second.",
        f"Memory of all processes at every tenth, in MiB: {', '.join(f'{size / 2**20:,.0f}' for size in memory)}.",
    )
    comparisons = tuple(
        PeerComparison(f"tokenising, {unit}", us, "the tokenizer library alone", ratio)
        for unit, ratio in zip(units, ratios, strict=True)
    )
    return Table("Tokenising", columns, rows, notes, comparisons)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
