"""What loads an output beside serving engines: Quark's own importer does, transformers cannot (yet)."""

from functools import cache

import pytest
import support
import torch
from eval_tiny import load_model
from support import TRAINED
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

LAYERS = range(1, 5)  # the MoE layers of the trained checkpoint


@cache
def imported(recipe: str) -> nn.Module:
    """The checkpoint as Quark imports it: packed weights, activations quantized on the fly."""
    from quark.torch.export.api import import_model_from_safetensors

    folder = support.output(TRAINED, recipe).output
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    return import_model_from_safetensors(model, str(folder)).eval()


@pytest.mark.parametrize("recipe", ["moe", "routed-mtp"])
def test_quarks_importer_packs_what_is_packed_and_nothing_else(recipe: str) -> None:
    """Quark reads the exclude list, aliases and regexes of the MTP layer included, and finds it right."""
    stored = support.tensors(support.output(TRAINED, recipe).output)
    loaded = imported(recipe).state_dict()
    mtp = "model.layers.5."  # transformers has no MTP layer
    expected = {name.replace("weight_scale", "weight_quantizer.scale") for name in stored if not name.startswith(mtp)}
    assert loaded.keys() == expected
    for name, tensor in loaded.items():
        file_name = name.replace("weight_quantizer.scale", "weight_scale")
        assert support.bits(tensor) == support.bits(stored[file_name][1])


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["moe", "routed-mtp"])
def test_quarks_importer_computes_what_the_decoded_weights_compute(recipe: str) -> None:
    ids = torch.arange(16, 80).view(2, 32)
    expected = load_model(support.output(TRAINED, recipe).output).base(ids).logits
    model = imported(recipe).float()
    for module in model.modules():
        if hasattr(module, "input_quantizer"):
            module.input_quantizer = None  # weights only, as in load_model
    assert (model(ids).logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_transformers_cannot_load_packed_experts() -> None:
    """It holds a layer's experts in one 3-D parameter; Quark's hook replaces Linear modules only."""
    folder = support.output(TRAINED, "moe").output
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(folder)
    _, info = AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True, output_loading_info=True)
    assert {name for name, _, _ in info["mismatched_keys"]} == {
        f"model.layers.{layer}.mlp.experts.{part}" for layer in LAYERS for part in ("gate_up_proj", "down_proj")
    }
    assert not info["missing_keys"]
