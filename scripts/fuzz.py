#!/usr/bin/env python3
"""Mutation fuzzing of everything that reads a stranger's file: each outcome must be a result or a GlmquantError.

    python scripts/fuzz.py                                     # 1,000,000 executions over all targets
    python scripts/fuzz.py --target header --executions 5000   # some, of one
    python scripts/fuzz.py --target header --input FILE        # one input again

Inputs begin as the attack files below and are changed as bytes, as tokens and as JSON trees; one that is refused with a
message not seen before joins them. Same seed, same inputs. Memory (--memory) and the time of each execution (--limit)
are limited: a MemoryError or a slow input is a fault like any other exception. A fault prints its traceback once, its
input is kept in --faults, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from glmquant import card
from glmquant.checkpoint.header import MAX_NAME, encode_header, parse_header
from glmquant.checkpoint.layers import Layers, read_layers
from glmquant.checkpoint.manifest import MANIFEST, Manifest, Run, ShardRecord
from glmquant.checkpoint.source import CONFIG, INDEX, RUN, RUN_FOLDER, SINGLE, inspect, unfinished
from glmquant.engines import matching, patterns
from glmquant.engines.model import Stored
from glmquant.engines.targets import parse_targets
from glmquant.errors import GlmquantError
from glmquant.recipe import load_architecture, parse_recipe_file
from glmquant.spelling import FORMS, as_globs, as_regexes, forms
from glmquant.text import printable
from glmquant.validator import validate_folder

LAYERS = Layers(5, (5,), frozenset({0}), frozenset({0, 1, 5}), 8, 1)
GLM = "glm_moe_dsa"
NAMES = [
    *(
        f"model.layers.{n}.{tail}"
        for n in (0, 3, 5)
        for tail in ("self_attn.o_proj", "mlp.gate_up_proj", "mlp.experts")
    ),
    "model.decoder.self_attn.fused_qkv_a_proj_with_mqa",
    "lm_head",
]
TARGETS = parse_targets("sglang==0.5.14,sglang==0.5.23,vllm==0.33.0,atom,quark")
LONGEST_MESSAGE = 20_000


def header_of(text: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    body = text.encode() if isinstance(text, str) else text
    return (len(body) if length is None else length).to_bytes(8, "little") + body + data


def entry(name: str, shape: str = "[2]", offsets: str = "[0,4]", dtype: str = '"BF16"') -> str:
    return f'"{name}":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


# Attack files

HEADERS = [
    encode_header([("a.weight", "BF16", (2, 2), 0, 8), ("b", "F32", (1,), 8, 12)], {"format": "pt"}) + bytes(12),
    header_of("{}", length=2**63),
    header_of("{}", length=100_000_000),
    header_of("{}", length=0),
    header_of("{" + entry("a"))[:20],
    header_of("{" + entry("a") + "," + entry("b", offsets="[2,6]") + "}", bytes(6)),
    header_of("{" + entry("a") + "," + entry("a") + "}", bytes(4)),
    header_of(b'{"\xff\xfe":1}'),
    header_of('{"a\\ud800":[]}'),
    header_of("[" * 2000),
    header_of('{"a":' * 900 + "1" + "}" * 900),
    header_of("{" + entry("a", shape="[NaN]") + "}", bytes(4)),
    header_of("{" + entry("a", shape="[Infinity,-Infinity,1e999]") + "}", bytes(4)),
    header_of("{" + entry("a", offsets="[-4,0]") + "}", bytes(4)),
    header_of("{" + entry("a", offsets="[4,0]") + "}", bytes(4)),
    header_of("{" + entry("a", shape=f"[{'9' * 5000}]") + "}", bytes(4)),
    header_of("{" + entry("a", shape=f"[{2**63 - 1},{2**63 - 1},0]", offsets="[0,0]") + "}"),
    header_of("{" + entry("a", shape=f"[{'1,' * 5000}2]") + "}", bytes(4)),
    header_of("{" + entry("a" * 5000) + "}", bytes(4)),
    header_of("{" + entry("\\u001b[31m\\n\\u202e{0.__class__}%s") + "}", bytes(4)),
    header_of("{" + entry("a", dtype='"F4"', shape="[3]", offsets="[0,1]") + "}", bytes(1)),
    header_of("{" + entry("a", shape="[true,2]") + "}", bytes(4)),
    header_of('{"__metadata__":{"a":null},' + entry("a") + "}", bytes(4)),
    header_of("{" + ",".join(entry(str(i), "[0]", "[0,0]") for i in range(300)) + "}"),
]
QUANTIZED = encode_header(
    [
        ("model.layers.3.mlp.experts.0.up_proj.weight", "U8", (2, 16), 0, 32),
        ("model.layers.3.mlp.experts.0.up_proj.weight_scale", "U8", (2, 1), 32, 34),
        ("model.layers.5.eh_proj.weight", "BF16", (2, 4), 34, 50),
    ],
    {},
) + bytes(50)
CONFIGS = [
    json.dumps(
        {
            "model_type": GLM,
            "num_hidden_layers": 5,
            "num_nextn_predict_layers": 1,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
            "indexer_types": ["full", "full", "shared", "shared", "shared"],
            "mlp_layer_types": None,
            "rms_norm_eps": 1e-05,
            **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"), 64),
            **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 32),
            **dict.fromkeys(("num_attention_heads", "index_n_heads", "index_head_dim"), 2),
            "quantization_config": {"quant_method": "quark", "exclude": ["lm_head", "re:.*"]},
        }
    ).encode(),
    b'{"model_type":"glm_moe_dsa","num_hidden_layers":1e999,"index_topk_pattern":"FFS"}',
    b'{"model_type":"../../etc/passwd","num_hidden_layers":-1}',
    b'{"model_type":["x"],"num_hidden_layers":NaN}',
    b'{"model_type":"glm_moe_dsa","num_hidden_layers":' + b"9" * 5000 + b"}",
    b'{"a":' * 60 + b"1" + b"}" * 60,
    '{"model_type":"glm_moe_dsa"}'.encode("utf-16"),
    b'{"architectures":["\\ud800"]}',
    b'{"a":1,"a":2}',
]
INDEXES = [
    json.dumps({"metadata": {"total_size": 12}, "weight_map": {"a.weight": SINGLE, "b": SINGLE}}).encode(),
    b'{"metadata":{"total_size":-1},"weight_map":{"a.weight":"../model.safetensors"}}',
    b'{"metadata":{"total_size":NaN},"weight_map":{"a.weight":"/etc/passwd"}}',
    b'{"weight_map":{"a.weight":"model.safetensors","a.weight":"model.safetensors"}}',
    b'{"weight_map":{"\\u001b]0;x\\u0007":"' + b"x" * 300 + b'.safetensors","c":"a\\\\b.safetensors"}}',
    b'{"weight_map":{"' + b"n" * 2000 + b'":"model.safetensors"}}',
    b'{"weight_map":[]}',
]
LISTS = [
    "\n".join(NAMES).encode(),
    rb"re:model\.layers\.(3|4|5)\..*" + b"\n" + rb"re:.*mlp\.experts.*$" + b"\nlm_head",
    b"re:(a*)*b\nre:(.|.)*x\nre:(.*.*.*)*x",
    b"re:(a{1000}){1000}\nre:" + b"(" * 19 + b"a" + b"+)" * 19,
    b"re:" + b"(" * 600 + b"\nre:" + b"(.|.)" * 30 + b"x",
    rb"re:(.+)\1+x" + b"\nre:^(?!.*(experts|lm_head)).*$\nre:(?x)(a*) *b\nre:(?P<n>a)(?P=n)",
    b"re:a{99999999999999999999}\nre:[[a]\nre:\\\nre:(?(1)a|b)\nre:(?i)[\xc4\x80-\xef\xbf\xbf]\nre:",
    b"*a*a*a*a*x\n[z-a]*\n[!]\n[[:alpha:]]*\n?*?*?*",
    b".experts." * 200 + b"\nmodel.layers.5.mlp.experts.7.up_proj",
]
RECIPES = [
    b"schema: 1\nextends: glm_moe_dsa\nrecipes:\n  mine:\n    about: a test\n    quantize:\n"
    b"      - {group: routed, layers: main, reason: to try it}\n"
    b"refuse:\n  - {when: {routed.main: mxfp4}, reason: a, instead: b, source: c}\n",
    b"schema: 1\nextends: !!python/object/apply:os.system [id]\n",
    b"schema: !!bool x\n",
    b'schema: !!int ""\n',
    b"schema: !!timestamp x\n",
    b"schema: 1\nschema: 1\n",
    b"schema: 1\n<<: {extends: glm_moe_dsa}\n",
    b"a: &a [x]\nb: &b [*a,*a,*a]\nextends: [*b,*b,*b]\nschema: 1\n",
    b"schema: 1\nextends: &x [*x]\n",
    b"? [a, b]\n: 1\n? {c: d}\n: 2\n",
    b"[" * 2000,
    b"schema: 1\nextends: glm_moe_dsa\nrecipes: {a: {about: \xff}}\n",
    b"schema: 1\nextends: glm_moe_dsa\nrecipes: {1: {about: a, quantize: [1, null, {group: [x]}]}}\nrefuse: {}\n",
]
MANIFESTS = [
    Manifest(
        {"format": 1, "recipe": "moe"},
        {SINGLE: ShardRecord(SINGLE, 20, ((8, "0" * 32), (20, "f" * 32)))},
        {CONFIG: (10, "0" * 32), "a/b.json": (0, "")},
    ).encode(),
    b'{"format":1,"digest":"xxh3_128","shards":{"../x":{"size":0,"ranges":[]}},"files":{},"fingerprint":{}}',
    b'{"format":1,"digest":"xxh3_128","shards":{},"files":{"/etc/passwd":[1,"a"]},"fingerprint":{}}',
    b'{"format":1e999,"digest":"xxh3_128"}',
    b'{"size":20,"ranges":[[8,"0"],[20,"f"]]}',
    b'{"size":20,"ranges":[[8,"0"],[4,"f"],[20,1]]}',
    b'{"continue":"glmquant quantize a b --resume","fingerprint":{}}',
    b'{"continue":{"a":["\\u001b[2J"]}}',
]
CARDS = [
    b"---\nlicense: mit\nlanguage:\n- en\n- no\nlicense_link: https://example.com/a\n---\n# Model\n",
    b'---\nlicense: "mit\\nbase_model: evil"\nlibrary_name: "a\\n---\\n<script>"\n---\n',
    b"---\nlicense: &a [*a]\nlanguage: {a: b}\npipeline_tag: !!python/name:os.system\n---\n",
    b"---\n" + b"[" * 2000 + b"\n---\n",
    b"---\r\nlicense: \xff\r\n---\r\n",
]
MODULES = [
    "\n".join(
        f"model.layers.{n}.{tail}"
        for n in range(6)
        for tail in ("self_attn.o_proj", "mlp.experts.0.up_proj", "mlp.experts.1.down_proj", "eh_proj")
    ).encode(),
    "model.layers.².mlp.experts.0.up_proj\nmodel.layers.٣.self_attn.o_proj\nmodel.layers.5.²".encode(),
    b"{0.__class__.__mro__}.mlp.experts.0.up_proj\n{layer}.mlp.experts.{expert}.x\nmodel.layers.{layer}.x\n%s%n",
    b"\x1b[31m\n..\n.\nmodel.layers." + b"9" * 900 + b".x\nmodel.layers.5..\n" + b".mlp.experts." * 50,
]
TOKENS = [
    *(b'NaN Infinity -Infinity 1e999 -1 0 1.5 null true [] {} "" 18446744073709551616 9223372036854775807'.split()),
    *(b'"dtype" "shape" "data_offsets" "__metadata__" "F4" "U8" "weight_map" "exclude" "size" "ranges"'.split()),
    *(b"re: .* (a|a)* (.*)* {1,9} \\1 (?= (?! (?P<n> ) ( | [a-z] [^ ] $ ^ + ? * &a *a !!bool --- : - #".split()),
    *("² ٣ é \u202e \u2028 \U0001f600 \ufeff".encode().split(b" ")),
    *(
        b"\\ud800",
        b"\\u0000",
        b"\0",
        b"\x1b[31m",
        b"\xff",
        b"\n",
        b"\r",
        b"\t",
        b"../",
        b"/etc/passwd",
        b"%s{0}<script>|`",
    ),
]
VALUES = [None, True, -1, 0, 2**63, 2**64, 10**400, 1.5, "", "x" * 2000, "\x1b[2J\u202e", "../x", [], {}, [[]], {"": 0}]


# Targets: each takes the bytes of one file


class Targets:
    def __init__(self, folder: Path) -> None:
        self.folder, self.run_folder = folder, folder / "run" / RUN_FOLDER
        self.checkpoint, self.base = folder / "checkpoint", load_architecture(GLM)
        self.checkpoint.mkdir()
        self.run_folder.mkdir(parents=True)
        (self.checkpoint / SINGLE).write_bytes(HEADERS[0])

    def header(self, data: bytes) -> None:
        found = parse_header("x.safetensors", data, len(data))
        end = 8 + int.from_bytes(data[:8], "little")
        for tensor in found.tensors:
            assert end == tensor.start <= tensor.end, tensor
            end = tensor.end
        assert end == len(data)

    def config(self, data: bytes) -> None:
        (self.checkpoint / INDEX).write_bytes(INDEXES[0])
        (self.checkpoint / CONFIG).write_bytes(data)
        found, _ = inspect(self.checkpoint)
        json.dumps(found.config, indent=2, ensure_ascii=False, allow_nan=False).encode()
        load_architecture(found.model_type)
        read_layers(found.config)

    def index(self, data: bytes) -> None:
        (self.checkpoint / CONFIG).write_bytes(CONFIGS[0])
        (self.checkpoint / INDEX).write_bytes(data)
        _, problems = inspect(self.checkpoint)
        if problems:
            raise problems[0].error()

    def exclude(self, data: bytes) -> None:
        entries = data.decode(errors="replace").split("\n")[:20]
        errors = []
        for make in (
            lambda: matching.ShardMatcher(
                entries, {"gate_up_proj": ["gate_proj"]}, fused_name=True, container_leaf=True, conflict="{module}"
            ),
            lambda: matching.AtomMatcher(entries, {"gate_proj": "gate_up_proj"}),
            lambda: matching.GlobMatcher(entries, 2, "some"),
        ):
            try:
                matcher: matching.Matcher = make()
                for name in NAMES:
                    matcher.ignored(name, name.endswith("experts"))
            except GlmquantError as err:
                errors.append(err)
        if errors:
            raise errors[0]

    def validate(self, data: bytes) -> None:
        """A header where there is a length word, else a config.json."""
        framed = len(data) > 8 and int.from_bytes(data[:8], "little") < 2**40
        (self.checkpoint / INDEX).write_bytes(INDEXES[0])
        (self.checkpoint / CONFIG).write_bytes(CONFIGS[0] if framed else data)
        (self.checkpoint / SINGLE).write_bytes(data if framed else QUANTIZED)
        try:
            validate_folder(self.checkpoint, TARGETS)
        finally:
            (self.checkpoint / SINGLE).write_bytes(HEADERS[0])

    def recipe(self, data: bytes) -> None:
        path = self.folder / "my.yaml"
        path.write_bytes(data)
        parse_recipe_file(path, self.base)

    def manifest(self, data: bytes) -> None:
        for path in (self.folder / MANIFEST, self.run_folder / RUN, self.run_folder / f"{SINGLE}.json"):
            path.write_bytes(data)
        unfinished(self.folder / "run")
        Run(self.folder / "run", {}).records()
        Manifest.read(self.folder).encode()

    def card(self, data: bytes) -> None:
        path = self.folder / "README.md"
        path.write_bytes(data)
        metadata = card._metadata(path, {"base_model": data[:40].decode(errors="replace")})
        text = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
        assert "\n---" not in text and yaml.safe_load(text) == metadata, text
        assert "\n" not in card._plain(data.decode(errors="replace"))

    def names(self, data: bytes) -> None:
        modules = [name[:MAX_NAME] for name in data.decode(errors="replace").split("\n")[:60]]
        formats = {name: ("plain", "mxfp4")[i % 3 == 1] for i, name in enumerate(modules)}
        for name in modules:
            self.base.module(name, LAYERS)
        stored = Stored.of(formats, LAYERS)
        for form in FORMS:
            for _, entries in forms(stored, self.base, form):
                for item in entries:
                    if item.origin == "regex":
                        re.compile(item.text[3:])
        as_globs(stored, self.base)
        as_regexes(stored, self.base)


@dataclass(frozen=True)
class Plan:
    """`share` of all executions, by cost; inputs are cut to `longest` bytes."""

    share: float
    corpus: list[bytes]
    longest: int = 50_000


PLANS = {
    "header": Plan(0.47, HEADERS),
    "config": Plan(0.13, CONFIGS),
    "index": Plan(0.13, INDEXES),
    "exclude": Plan(0.10, LISTS),
    "validate": Plan(0.002, [QUANTIZED, *CONFIGS, *HEADERS]),
    "recipe": Plan(0.02, RECIPES, 1000),
    "manifest": Plan(0.10, MANIFESTS),
    "card": Plan(0.02, CARDS, 1000),
    "names": Plan(0.03, MODULES),
}


# Mutations


def mutate(rng: random.Random, corpus: list[bytes]) -> bytes:
    """A file of the corpus changed; most of the time the length word of a header stays right."""
    data = rng.choice(corpus)
    length = int.from_bytes(data[:8], "little")
    framed = 0 < length <= len(data) - 8 and rng.random() < 0.8
    data, tail = (data[8 : 8 + length], data[8 + length :]) if framed else (data, b"")
    changed_tree = rng.random() < 0.5
    if changed_tree:
        data = mutate_tree(rng, data)
    for _ in range(rng.choice((0, 0, 1) if changed_tree else (1, 1, 2, 4))):
        data = mutate_bytes(rng, data, corpus)
    return len(data).to_bytes(8, "little") + data + tail if framed else data


def mutate_bytes(rng: random.Random, data: bytes, corpus: list[bytes]) -> bytes:
    a, b = sorted((rng.randint(0, len(data)), min(len(data), rng.randint(0, 40) + rng.randint(0, len(data)))))
    match rng.randrange(8):
        case 0 if data:
            at = rng.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:a] + rng.choice(TOKENS) * rng.choice((1, 1, 1, 3, 100)) + data[a:]
        case 2:
            return data[:a] + rng.choice(TOKENS) + data[min(b, a + 8) :]
        case 3:
            return data[:a] + data[b:]
        case 4:
            return data[:b] + data[a:b] * rng.choice((1, 1, 2, 30)) + data[b:]
        case 5:
            other = rng.choice(corpus)
            return data[:a] + other[rng.randint(0, len(other)) :]
        case 6:
            if numbers := list(re.finditer(rb"\d+", data)):
                found = rng.choice(numbers)
                number = str(int(found[0][:20]) + rng.choice((-1, 1, 2**31, 2**63))).encode()
                return data[: found.start()] + number + data[found.end() :]
    return data[:a] + rng.randbytes(rng.randint(1, 4)) + data[a:]


def mutate_tree(rng: random.Random, data: bytes) -> bytes:
    """As JSON; unchanged if it is none."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return data
    for _ in range(rng.choice((1, 1, 2, 5))):
        tree = change(rng, tree)
    return json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode(errors="replace")


def change(rng: random.Random, tree: Any) -> Any:
    """One node of the tree replaced, removed, repeated or wrapped."""
    if isinstance(tree, (dict, list)) and tree and rng.random() < 0.8:
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        key = rng.choice(keys)
        copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
        roll = rng.random()
        if roll < 0.1:
            del copy[key]
        elif roll < 0.2 and isinstance(copy, dict):
            copy[rng.choice(TOKENS).decode(errors="replace")] = copy.pop(key)
        elif roll < 0.3 and isinstance(copy, list):
            copy += [copy[key]] * rng.choice((1, 20))
        else:
            copy[key] = change(rng, copy[key])
        return copy
    if rng.random() < 0.1:
        for _ in range(rng.choice((1, 60))):
            tree = [tree]
        return tree
    return rng.choice(VALUES)


# The loop


class Slow(BaseException):
    pass


def slow(*_: object) -> None:
    raise Slow


def skeleton(err: GlmquantError) -> str:
    """A message without what differs from input to input."""
    text = re.sub(r"(['\"`]).*\1|\[.*\]", "_", err.message.split("\n")[0])
    return f"{type(err).__name__}: {re.sub(r'/.*/|0x[0-9a-f]+|[0-9.,-]+', '0', text)}"[:90]


def execute(run: Callable[[bytes], None], data: bytes, limit: float) -> str:
    """What became of an input; '' for a result.

    Raises: whatever is no GlmquantError, Slow after `limit` seconds.
    """
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        run(data)
    except GlmquantError as err:
        text = printable(str(err))
        assert len(text) < LONGEST_MESSAGE, f"a message of {len(text)} characters"
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text), "an unprintable message"
        return skeleton(err)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return ""


def fuzz(name: str, run: Callable[[bytes], None], executions: int, args: argparse.Namespace) -> int:
    """Prints what became of the executions; returns the number of different faults."""
    rng, corpus = random.Random(f"{args.seed} {name}"), list(PLANS[name].corpus)
    seeds, outcomes, faults = list(corpus), Counter[str](), set()
    begun = time.monotonic()
    for number in range(executions):
        data = seeds[number] if number < len(seeds) else mutate(rng, corpus)[: PLANS[name].longest]
        try:
            outcome = execute(run, data, args.limit)
            if outcome not in outcomes and len(corpus) < 500:
                corpus.append(data)
        except (Exception, Slow) as err:
            outcome = f"FAULT {type(err).__name__}"
            place = (type(err), *((f.filename, f.lineno) for f in traceback.extract_tb(err.__traceback__)[-1:]))
            if place not in faults:
                faults.add(place)
                path = args.faults / f"fuzz-{name}-{hashlib.sha256(data).hexdigest()[:12]}"
                path.write_bytes(data)
                print("".join(traceback.format_tb(err.__traceback__, -6)), f"{type(err).__name__}: {err}"[:500], sep="")
                print(f"execution {number} of {name}: input in {path}", flush=True)
        outcomes[outcome] += 1
    print(f"{name}: {executions:,} executions, {time.monotonic() - begun:.0f} s, {len(faults)} faults")
    for text, count in outcomes.most_common(args.show):
        print(f"  {count:8,}  {text or 'a result'}")
    if len(outcomes) > args.show:
        print(f"  {sum(outcomes.values()) - sum(c for _, c in outcomes.most_common(args.show)):8,}  others")
    sys.stdout.flush()
    return len(faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--target", choices=PLANS, help="this one only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--input", type=Path, metavar="FILE", help="run this input on --target, nothing else")
    parser.add_argument("--limit", type=float, default=5.0, metavar="SECONDS", help="of one execution (default 5)")
    parser.add_argument("--memory", type=float, default=1.5, metavar="GB", help="address space (default 1.5)")
    parser.add_argument("--faults", type=Path, default=Path(), metavar="DIR", help="where to keep inputs (default .)")
    parser.add_argument("--show", type=int, default=12, metavar="N", help="outcomes to print per target")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (int(args.memory * 1e9),) * 2)
    signal.signal(signal.SIGALRM, slow)
    logging.disable()
    patterns.BUDGET = 0.1  # else a list that is too slow takes most of the limit
    chosen = [args.target] if args.target else list(PLANS)
    total = sum(PLANS[name].share for name in chosen)
    begun = time.monotonic()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="glmquant-fuzz-", dir=memory if memory.is_dir() else None) as folder:
        targets = Targets(Path(folder))
        if args.input:
            print(execute(getattr(targets, args.target), args.input.read_bytes(), args.limit) or "a result")
            return 0
        counts = {name: round(args.executions * PLANS[name].share / total) for name in chosen}
        faults = sum(fuzz(name, getattr(targets, name), count, args) for name, count in counts.items())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{sum(counts.values()):,} executions with seed {args.seed}, {time.monotonic() - begun:.0f} s, "
        f"{peak:.2f} GB at most, {faults} faults"
    )
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
