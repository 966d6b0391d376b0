"""Folders of NVFP4 weights, written here as their producers describe them."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

import autoematic_jax
from autoematic_jax.checkpoints import convert
from autoematic_jax.checkpoints import load_checkpoint
from autoematic_jax.checkpoints import open_source
from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import PrecisionError
from autoematic_jax.models import registry

CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 50,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "max_position_embeddings": 64,
  "tie_word_embeddings": False,
}
EXPERTS = {
  "architectures": ["Qwen3MoeForCausalLM"],
  "head_dim": 16,
  "moe_intermediate_size": 16,
  "num_experts": 2,
  "num_experts_per_tok": 1,
  "norm_topk_prob": True,
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
MODELOPT |= {"group_size": 16, "exclude_modules": ["lm_head"]}
WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16}
WEIGHTS |= {"strategy": "tensor_group", "symmetric": True, "dynamic": False}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}
COMPRESSED = {
  "quant_method": "compressed-tensors",
  "format": "nvfp4-pack-quantized",
  "config_groups": {"group_0": GROUP},
  "ignore": ["lm_head"],
}
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
NAMES = {
  np.dtype(np.float32): "F32",
  np.dtype(np.uint8): "U8",
  np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
}


def write(folder, config, tensors):
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(config))
  header, data = {}, b""
  for name, values in tensors.items():
    content = np.asarray(values).tobytes()
    header[name] = {
      "dtype": NAMES[values.dtype],
      "shape": list(values.shape),
      "data_offsets": [len(data), len(data) + len(content)],
    }
    data += content
  text = json.dumps(header).encode()
  blob = struct.pack("<Q", len(text)) + text + data
  (folder / "model.safetensors").write_bytes(blob)
  return folder


def random_parts(rng, rows, columns):
  """Codes, group scales (a subnormal among them), and a tensor scale."""
  codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
  scale = rng.integers(0x20, 0x7F, (rows, columns // 16), dtype=np.uint8)
  scale[0, 0] = 3
  return codes, scale.view(ml_dtypes.float8_e4m3fn), np.float32(0.0007)


def decoded(codes, scale, tensor_scale):
  nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
  values = np.where(nibbles & 8, -1, 1) * VALUES[nibbles & 7]
  scale = np.repeat(scale.astype(np.float32), 16, 1)
  return (values * scale * tensor_scale).astype(np.float32)


class Model:
  """Packed parts of every matrix, and the other tensors."""

  def __init__(self, config):
    rng = np.random.default_rng(0)
    self.config = config
    specs = registry.tensor_specs(registry.config_from_hf(config))
    self.parts = {
      name.removesuffix(".weight"): random_parts(rng, *spec.shape)
      for name, spec in specs.items()
      if spec.kind == "linear"
    }
    self.dense = {
      name: rng.normal(size=spec.shape).astype(np.float32)
      for name, spec in specs.items()
      if spec.kind == "dense"
    }

  def modelopt(self):
    tensors = dict(self.dense)
    for name, (codes, scale, tensor_scale) in self.parts.items():
      tensors[f"{name}.weight"] = codes
      tensors[f"{name}.weight_scale"] = scale
      tensors[f"{name}.weight_scale_2"] = np.asarray(tensor_scale)
      tensors[f"{name}.input_scale"] = np.asarray(0.01, np.float32)
    one = np.ones(1, np.float32)
    key = "model.layers.0.self_attn.k_proj.k_scale"
    return {**self.config, "quantization_config": MODELOPT}, tensors | {
      key: one
    }

  def compressed(self, activations=None):
    tensors = dict(self.dense)
    for name, (codes, scale, tensor_scale) in self.parts.items():
      tensors[f"{name}.weight_packed"] = codes
      tensors[f"{name}.weight_scale"] = scale
      inverse = np.asarray([1 / tensor_scale], np.float32)
      tensors[f"{name}.weight_global_scale"] = inverse
      if activations:
        tensors[f"{name}.input_global_scale"] = inverse
    group = {**GROUP, "input_activations": activations}
    quantization = {**COMPRESSED, "config_groups": {"group_0": group}}
    return {**self.config, "quantization_config": quantization}, tensors


@pytest.fixture(scope="module")
def model():
  return Model(CONFIG)


LAYOUTS = {
  "modelopt": Model.modelopt,
  "weight-only": Model.compressed,
  "w4a4": lambda model: model.compressed({"num_bits": 4, "type": "float"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_and_scales_are_kept_bit_for_bit(layout, model, tmp_path):
  folder = write(tmp_path / "source", *LAYOUTS[layout](model))
  convert(folder, tmp_path / "out")
  checkpoint = load_checkpoint(tmp_path / "out")
  stored = dict(checkpoint.tensors())
  for name, (codes, scale, tensor_scale) in model.parts.items():
    tensor = stored[f"{name}.weight"]
    assert (tensor.format, tensor.refined) == ("autofp6", 0)
    np.testing.assert_array_equal(tensor.codes, codes)
    np.testing.assert_array_equal(
      np.asarray(tensor.group_scale).view(np.uint8), scale.view(np.uint8)
    )
    np.testing.assert_allclose(tensor.tensor_scale, tensor_scale, rtol=2e-7)
  method = checkpoint.metadata["made"]["method"]
  assert f"in {len(model.parts)} matrices" in method
  assert "activations, keys and values only" in method


def test_unpacked_values_are_those_of_the_layout(model, tmp_path):
  folder = write(tmp_path / "source", *model.modelopt())
  source = open_source(folder)
  assert source.names == {*model.dense, *(f"{n}.weight" for n in model.parts)}
  for name, parts in model.parts.items():
    np.testing.assert_allclose(
      source.read(f"{name}.weight"), decoded(*parts), rtol=3e-7
    )


def test_an_imported_model_answers_at_4_and_6_bits(model, tmp_path):
  folder = write(tmp_path / "source", *model.modelopt())
  convert(folder, tmp_path / "out", levels=(4, 6))
  loaded = autoematic_jax.load(tmp_path / "out")
  result = autoematic_jax.generate(
    loaded, [1, 2, 3], max_new_tokens=3, ignore_eos=True
  )
  assert set(np.unique(result.trace)) <= {4, 6}


def test_matrices_left_out_are_rounded_and_said_to_be(model, tmp_path):
  config, tensors = model.modelopt()
  for part in ("weight_scale", "weight_scale_2", "input_scale"):
    del tensors[f"{DOWN}.{part}"]
    del tensors[f"{Q}.{part}"]
  for name in (DOWN, Q):
    tensors[f"{name}.weight"] = decoded(*model.parts[name])
  config["quantization_config"] = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
      name: {"quant_algo": "NVFP4"}
      for name in model.parts
      if name not in (DOWN, Q)
    },
  }
  convert(write(tmp_path / "source", config, tensors), tmp_path / "out")
  checkpoint = load_checkpoint(tmp_path / "out")
  assert "2 others rounded" in checkpoint.metadata["made"]["method"]
  stored = dict(checkpoint.tensors())
  assert stored[f"{DOWN}.weight"].refined
  assert not stored[f"{Q}.weight"].refined


def modelopt_in_a_file_of_its_own(model, folder):
  config, tensors = model.modelopt()
  del config["quantization_config"]
  write(folder, config, tensors)
  text = json.dumps({"quantization": {"quant_algo": "NVFP4"}})
  (folder / "hf_quant_config.json").write_text(text)


def test_older_modelopt_folders_are_known(model, tmp_path):
  modelopt_in_a_file_of_its_own(model, tmp_path / "source")
  assert open_source(tmp_path / "source").packed(f"{Q}.weight") is not None


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"quant_algo": "FP8"}, "'FP8'"),
    (
      {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {Q: {"quant_algo": "FP8"}},
      },
      rf"1 layers that are not NVFP4: {Q} \(FP8\)",
    ),
    ({"group_size": 32}, "group_size 32"),
    ({"exclude_modules": ["*q_proj"]}, f"{Q} is packed, and"),
  ],
)
def test_other_modelopt_configs_are_refused(changes, message, model, tmp_path):
  config, tensors = model.modelopt()
  config["quantization_config"] = MODELOPT | changes
  with pytest.raises(CheckpointError, match=message):
    open_source(write(tmp_path / "source", config, tensors))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"format": "float-quantized"}, "'float-quantized'"),
    ({"config_groups": {"g": {**GROUP, "format": "pack-quantized"}}}, "'pack-"),
    (
      {"config_groups": {"g": {**GROUP, "weights": {"num_bits": 8}}}},
      "num_bits=8",
    ),
    ({"config_groups": {"g": {**GROUP, "targets": ["re:.*q"]}}}, "targets"),
    ({"ignore": ["re:.*q_proj"]}, f"{Q} is packed, and"),
    ({"transform_config": {"config_groups": {}}}, "transform_config"),
  ],
)
def test_other_compressed_configs_are_refused(
  changes, message, model, tmp_path
):
  config, tensors = model.compressed()
  config["quantization_config"] = COMPRESSED | changes
  with pytest.raises(CheckpointError, match=message):
    open_source(write(tmp_path / "source", config, tensors))


def test_an_expert_without_input_scale_is_named(tmp_path):
  config, tensors = Model(CONFIG | EXPERTS).modelopt()
  expert = "model.layers.0.mlp.experts.1.up_proj"
  del tensors[f"{expert}.input_scale"]
  with pytest.raises(CheckpointError, match=f"lack input_scale.*{expert}"):
    open_source(write(tmp_path / "source", config, tensors))


def test_fp8_among_fp4_is_named(model, tmp_path):
  config, tensors = model.compressed()
  weight = np.zeros((32, 32), ml_dtypes.float8_e4m3fn)
  tensors[f"{Q}.weight"] = weight
  del tensors[f"{Q}.weight_packed"]
  with pytest.raises(CheckpointError, match=rf"{Q}\.weight.*FP8"):
    open_source(write(tmp_path / "source", config, tensors))


@pytest.mark.parametrize(
  ("scale", "message"),
  [
    (0.0, "not a finite, normal"),
    (1e-40, "not a finite, normal"),
    (np.nan, "not a finite, normal"),
    (1 / 0.0007, "reciprocal"),
  ],
)
@pytest.mark.parametrize("layout", ["modelopt", "weight-only"])
def test_implausible_tensor_scales_are_refused(
  layout, scale, message, model, tmp_path
):
  config, tensors = LAYOUTS[layout](model)
  part = "weight_scale_2"
  if layout != "modelopt":
    part = "weight_global_scale"
    scale = {1 / 0.0007: 0.0007}.get(scale, scale)
  shape = tensors[f"{Q}.{part}"].shape
  tensors[f"{Q}.{part}"] = np.full(shape, scale, np.float32)
  folder = write(tmp_path / "source", config, tensors)
  with pytest.raises(CheckpointError, match=f"{Q}.*{message}"):
    convert(folder, tmp_path / "out")


@pytest.mark.parametrize(("byte", "says"), [(0, "0.0"), (0x7F, "nan")])
def test_group_scales_that_lose_weights_are_refused(
  byte, says, model, tmp_path
):
  config, tensors = model.modelopt()
  scale = tensors[f"{Q}.weight_scale"].view(np.uint8).copy()
  scale[3, 1] = byte
  tensors[f"{Q}.weight_scale"] = scale.view(ml_dtypes.float8_e4m3fn)
  folder = write(tmp_path / "source", config, tensors)
  with pytest.raises(CheckpointError, match=f"first {says} of row 3, group 1"):
    convert(folder, tmp_path / "out")


def test_an_empty_group_may_have_the_scale_0(model, tmp_path):
  config, tensors = model.modelopt()
  scale = tensors[f"{Q}.weight_scale"].view(np.uint8).copy()
  codes = tensors[f"{Q}.weight"].copy()
  scale[3, 1], codes[3, 8:] = 0, 0x80
  tensors[f"{Q}.weight_scale"] = scale.view(ml_dtypes.float8_e4m3fn)
  tensors[f"{Q}.weight"] = codes
  source = open_source(write(tmp_path / "source", config, tensors))
  assert not source.read(f"{Q}.weight")[3, 16:].any()


@pytest.mark.parametrize("format", ["fp6g", "autofp8"])
def test_a_given_base_is_not_rounded_again(format, model, tmp_path):
  folder = write(tmp_path / "source", *model.modelopt())
  with pytest.raises(PrecisionError, match=f"cannot become {format}"):
    convert(folder, tmp_path / "out", format=format)


def test_a_missing_head_is_named(model, tmp_path):
  config, tensors = model.modelopt()
  del tensors["lm_head.weight"]
  folder = write(tmp_path / "source", config, tensors)
  with pytest.raises(CheckpointError, match=r"lacks 1 tensor: lm_head\.weight"):
    convert(folder, tmp_path / "out")
