"""Every release builds, loads and answers; the failure that every list has to avoid is real."""

from __future__ import annotations

from pathlib import Path

import ckpt
import harness
import pytest

pytestmark = pytest.mark.conformance

MTP = "model.layers.4."  # of the tiny checkpoints
# modules that never ask the quantization config, whatever the list says
UNASKED = ("embed_tokens", "lm_head", "shared_head.head", "mlp.gate", "weights_proj")


def draft_name(name: str) -> str:
    """The name of a module of the MTP layer in sglang's draft model."""
    glue = any(part in name for part in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
    return name.replace(MTP, "model." if glue else "model.decoder.")


LEAVES = ckpt.unquantized(ckpt.config(), ckpt.VARIANTS["A"])
LISTS = {
    "leaves": LEAVES,
    "both names": LEAVES + [draft_name(n) for n in LEAVES if n.startswith(MTP)],
    "empty": [],
}


def is_old(engine: str, release: str) -> bool:
    """sglang 0.5.15 and earlier do not map the MTP layer's excludes to the draft's names."""
    return engine == "sglang" and release in ("0.5.13.post1", "0.5.14", "0.5.15.post1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: ckpt.write(root / name, exclude) for name, exclude in LISTS.items()}


@pytest.mark.parametrize(("engine", "release"), [(e, r) for e in ("sglang", "vllm") for r in harness.releases(e)])
def test_a_release_loads_and_matches(engine: str, release: str, folders: dict[str, Path]) -> None:
    loaded = harness.load(engine, release, list(folders.values()))
    by_list = dict(zip(folders, loaded, strict=True))

    good = by_list["both names"]
    assert good["ok"], good
    assert good["target"]["experts"] == {"same": 144, "different": 0, "first": []}
    assert good["draft"]["experts"] == {"same": 48, "different": 0, "first": []}

    for role in ("target", "draft"):
        assert by_list["empty"][role]["stage"] == "load_weights"
        assert not by_list["empty"][role]["loaded"]

    leaves = by_list["leaves"]
    assert leaves["ok"] is not is_old(engine, release)
    if is_old(engine, release):
        assert leaves["target"]["loaded"]
        assert leaves["draft"]["culprit"]["tensor"] == f"{MTP}eh_proj.weight"
        assert leaves["draft"]["culprit"]["param"].startswith("uint8")

    # the match script says of every module what the built model shows
    shown = [{role: asked(a[role]["schemes"]) for role in ("target", "draft")} for a in loaded]
    cases = [
        {
            "exclude": exclude,
            "config": {"num_hidden_layers": 4, "n_routed_experts": 8},
            "prefixes": list(prefixes["target"]),
            "draft_prefixes": list(prefixes["draft"]),
        }
        for exclude, prefixes in zip(LISTS.values(), shown, strict=True)
    ]
    for answer, prefixes, built in zip(harness.match(engine, release, cases), shown, loaded, strict=True):
        for role in ("target", "draft"):
            assert dict(zip(prefixes[role], answer[role], strict=True)) == prefixes[role]
            if engine == "sglang":
                assert answer[f"fuse_{role}"] is bool(built[role]["fused_shared_experts"])


def asked(schemes: dict[str, str]) -> dict[str, bool]:
    """Prefix -> left un-quantized, of the linears and the routed experts that asked."""
    # vLLM's module tree has two levels that its prefixes do not
    names = {n.replace(".mtp_block", "").removesuffix(".routed_experts"): s for n, s in schemes.items()}
    return {
        name: scheme.startswith("Unquantized")
        for name, scheme in names.items()
        if not name.endswith(UNASKED) and "KVCache" not in scheme
    }
