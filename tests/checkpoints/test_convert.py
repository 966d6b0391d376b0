import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest

from autoematic_jax import formats
from autoematic_jax.checkpoints import convert
from autoematic_jax.checkpoints import layout
from autoematic_jax.checkpoints import load_checkpoint
from autoematic_jax.checkpoints import open_source
from autoematic_jax.checkpoints.options import ConvertOptions
from autoematic_jax.errors import AutoematicError
from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import NonFiniteError
from autoematic_jax.errors import PrecisionError
from autoematic_jax.errors import UnsupportedModelError
from autoematic_jax.models import registry

LAYER = "model.layers.0."
QKV = [f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv"]
GATE_UP = [f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up")]
NORM = "model.norm.weight"


@pytest.fixture
def weights(hf_folder):
  source = open_source(hf_folder(name="original"))
  return {name: np.array(source.read(name)) for name in source.names}


def assert_same(first, second):
  first, second = jax.tree.flatten(first), jax.tree.flatten(second)
  assert first[1] == second[1]
  for a, b in zip(first[0], second[0], strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
  ("format", "decoding"),
  [
    ("autofp6", "exponent"),
    ("autofp6", "fixed"),
    ("autofp8", "exponent"),
    ("nvfp4", "exponent"),
    ("fp6g", "exponent"),
  ],
)
def test_matrices_are_quantized_and_everything_else_is_kept(
  hf_folder, tmp_path, weights, format, decoding
):
  """With K of 60 and 464, so with padding."""
  out = tmp_path / "out"
  convert(hf_folder(), out, format=format, decoding=decoding)
  checkpoint = load_checkpoint(out)
  specs = registry.tensor_specs(checkpoint.config)
  tensors = dict(checkpoint.tensors())
  assert tensors.keys() == specs.keys()
  for name, tensor in tensors.items():
    if specs[name].kind == "dense":
      assert_same(tensor, weights[name].astype(ml_dtypes.bfloat16))
      continue
    assert (tensor.format, tensor.decoding) == (format, decoding)
    mask = None
    if tensor.refinement_mask is not None:
      mask = np.asarray(formats.mask_bits(tensor))
    expected = formats.quantize_weight(
      jax.numpy.asarray(weights[name]),
      format=format,
      decoding=decoding,
      refinement_mask=mask,
    )
    assert_same(tensor, expected)
    assert formats.dequantize(tensor).shape == weights[name].shape


@pytest.mark.parametrize("group", [QKV, GATE_UP])
def test_matrices_with_one_input_share_the_mask_of_most_joint_gain(
  hf_folder, tmp_path, weights, group
):
  convert(hf_folder(), tmp_path / "out", rho=0.1)
  tensors = dict(load_checkpoint(tmp_path / "out").tensors())
  gain = sum(
    np.asarray(
      formats.refinement_gain(
        weights[name], format="autofp6", decoding="exponent"
      ),
      np.float64,
    )
    for name in group
  )
  budget = formats.refinement_budget(weights[group[0]].shape[1], 0.1)
  expected = formats.select_refinement_mask(gain, budget)
  for name in group:
    mask = np.asarray(formats.mask_bits(tensors[name]))
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize(
  ("format", "dtype"),
  [("bf16", ml_dtypes.bfloat16), ("fp32", np.float32)],
)
def test_dense_formats_keep_every_tensor(
  hf_folder, tmp_path, weights, format, dtype
):
  sizes = convert(hf_folder(), tmp_path / "out", format=format)
  checkpoint = load_checkpoint(tmp_path / "out")
  assert checkpoint.levels == ()
  assert checkpoint.policy is None
  assert sizes.quantized_weights == 0
  for name, tensor in checkpoint.tensors():
    assert_same(tensor, weights[name].astype(dtype))


def test_gguf_and_safetensors_of_one_model_convert_alike(
  hf_folder, gguf_file, tmp_path, weights
):
  convert(hf_folder(weights, name="folder"), tmp_path / "a")
  convert(gguf_file(weights), tmp_path / "b")
  tensors = [dict(load_checkpoint(tmp_path / name).tensors()) for name in "ab"]
  assert_same(*tensors)


def test_shards_and_dtypes_convert_alike(hf_folder, tmp_path, weights):
  exact = {
    name: values.astype(ml_dtypes.bfloat16) for name, values in weights.items()
  }
  convert(hf_folder(exact, dtype="BF16", shards=3, name="x"), tmp_path / "a")
  convert(hf_folder(exact, dtype="F32", name="y"), tmp_path / "b")
  tensors = [dict(load_checkpoint(tmp_path / name).tensors()) for name in "ab"]
  assert_same(*tensors)


def test_nothing_is_refined_at_rho_0(hf_folder, tmp_path):
  convert(hf_folder(), tmp_path / "out", rho=0.0)
  for _, tensor in load_checkpoint(tmp_path / "out").tensors():
    if isinstance(tensor, formats.QTensor):
      assert tensor.refined == 0


def test_options_are_stored(hf_folder, tmp_path):
  convert(
    hf_folder(),
    tmp_path / "out",
    rho=0.25,
    decoding="fixed",
    levels=(4, 6),
    dense_dtype="float32",
    policy={"tau": 0.3},
  )
  checkpoint = load_checkpoint(tmp_path / "out")
  assert checkpoint.levels == (4, 6)
  assert checkpoint.decoding == "fixed"
  assert checkpoint.metadata["rho"] == 0.25
  assert checkpoint.policy["tau"] == 0.3
  assert checkpoint.policy["levels"] == [4, 6]
  assert checkpoint.rest()[NORM].dtype == np.float32


def test_the_metadata_says_how_it_was_made(checkpoint_path):
  metadata = json.loads((checkpoint_path / "autoematic.json").read_text())
  made = metadata["made"]
  assert made["source"] == "Hugging Face folder tiny"
  assert made["time"].endswith("+00:00")
  assert made["versions"].keys() >= {"autoematic_jax", "jax", "numpy"}


def test_sizes_are_those_on_disk(hf_folder, tmp_path):
  sizes = convert(hf_folder(), tmp_path / "out")
  files = [p for p in (tmp_path / "out/weights").rglob("*") if p.is_file()]
  assert sizes.disk_bytes == sum(file.stat().st_size for file in files)
  tensors = dict(load_checkpoint(tmp_path / "out").tensors())
  packed = [t for t in tensors.values() if isinstance(t, formats.QTensor)]
  dense = [t for t in tensors.values() if not isinstance(t, formats.QTensor)]
  assert sizes.dense_bytes == sum(t.nbytes for t in dense)
  assert sizes.quantized_weights == sum(t.rows * t.columns for t in packed)
  # Uncompressed: what Orbax adds to the arrays does not grow with them.
  added = sizes.quantized_bytes - sum(t.nbytes for t in packed)
  assert 0 <= added < 3 * 20_000


@pytest.mark.slow
def test_autofp6_takes_4_9_bits_on_disk(hf_folder, tmp_path):
  """On matrices large enough for Orbax's own files not to count."""
  config = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 1,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
  }
  folder = hf_folder({}, **config)
  source_config = json.loads((folder / "config.json").read_text())
  specs = registry.tensor_specs(registry.config_from_hf(source_config))
  rng = np.random.default_rng(0)
  weights = {
    name: rng.normal(size=spec.shape).astype(np.float32)
    for name, spec in specs.items()
  }
  sizes = convert(hf_folder(weights, name="full", **config), tmp_path / "out")
  assert sizes.stored_bits == pytest.approx(4.9, abs=0.05)


def edited(weights, **changes):
  """The weights with some replaced, or left out where None."""
  changed = {**weights, **{k.replace("__", "."): v for k, v in changes.items()}}
  return {
    name: values for name, values in changed.items() if values is not None
  }


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({NORM: None}, r"lacks 1 tensor: model\.norm\.weight"),
    ({"model.vision": np.zeros(3)}, r"1 tensor: model\.vision"),
    (
      {NORM: np.zeros(61)},
      r"model\.norm\.weight has shape \[61\].*describes \[60\]",
    ),
    ({QKV[0]: np.zeros((60, 61))}, r"q_proj\.weight has shape \[60, 61\]"),
  ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
  hf_folder, tmp_path, weights, changes, message
):
  folder = hf_folder(edited(weights, **changes))
  with pytest.raises(CheckpointError, match=message):
    convert(folder, tmp_path / "out")


def test_harmless_leftovers_are_ignored(hf_folder, tmp_path, weights):
  extra = {
    f"{LAYER}self_attn.rotary_emb.inv_freq": np.zeros(5),
    "lm_head.weight": weights["model.embed_tokens.weight"],
  }
  convert(hf_folder(weights | extra), tmp_path / "out")
  assert "lm_head.weight" not in dict(
    load_checkpoint(tmp_path / "out").tensors()
  )


def test_an_untied_model_needs_its_head(hf_folder, tmp_path, weights):
  folder = hf_folder(weights, tie_word_embeddings=False)
  with pytest.raises(CheckpointError, match=r"lacks 1 tensor: lm_head\.weight"):
    convert(folder, tmp_path / "out")


@pytest.mark.parametrize("format", ["autofp6", "bf16"])
@pytest.mark.parametrize("name", [NORM, GATE_UP[1]])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_nan_and_inf_are_named_and_counted(
  hf_folder, tmp_path, weights, format, name, dtype
):
  values = weights[name].copy()
  values.reshape(-1)[[3, 5]] = np.nan
  values.reshape(-1)[7] = -np.inf
  folder = hf_folder(edited(weights, **{name: values}), dtype=dtype)
  with pytest.raises(NonFiniteError, match=f"{name} holds 2 NaN and 1 Inf"):
    convert(folder, tmp_path / "out", format=format)
  assert [p.name for p in tmp_path.glob("out*")] == []


@pytest.mark.parametrize(
  ("config", "message"),
  [
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    ({"sliding_window": 4096}, "sliding_window=4096"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
  ],
)
def test_models_that_are_not_handled_are_refused(
  hf_folder, tmp_path, config, message
):
  with pytest.raises(UnsupportedModelError, match=message):
    convert(hf_folder(**config), tmp_path / "out")


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"format": "int8"}, "format 'int8' is unknown; known: nvfp4"),
    ({"decoding": "float"}, "decoding 'float'"),
    ({"rho": 0.6}, r"rho=0\.6"),
    ({"rho": float("nan")}, "rho=nan"),
    ({"levels": (4, 8)}, r"levels \(4, 8\).*\(2, 4, 6\), which autofp6"),
    ({"levels": (6, 4)}, "ascending"),
    ({"levels": (4, 4)}, "ascending"),
    ({"levels": ()}, "levels is empty"),
    ({"format": "bf16", "levels": (4,)}, "bf16 holds"),
    ({"dense_dtype": "float16"}, "dense_dtype 'float16'"),
    ({"format": "bf16", "dense_dtype": "float32"}, "stores bfloat16"),
    ({"policy": {"tua": 1}}, "tua"),
    ({"policy": {"tau": 7}}, "tau=7"),
    ({"levels": (4, 6), "policy": {"levels": [2, 4]}}, r"\(2, 4\)"),
    ({"format": "fp32", "policy": {"tau": 0.1}}, "no levels for a policy"),
  ],
)
def test_options_that_make_no_sense_are_refused(options, message):
  with pytest.raises(PrecisionError, match=message):
    ConvertOptions(**options)


def test_options_are_refused_before_anything_is_read(tmp_path):
  with pytest.raises(PrecisionError):
    convert(tmp_path / "nowhere", tmp_path / "out", levels=(8,))


def test_nothing_of_a_failed_conversion_is_left(hf_folder, tmp_path, weights):
  folder = hf_folder(edited(weights, **{NORM: np.full(60, np.nan)}))
  before = sorted(tmp_path.rglob("*"))
  with pytest.raises(AutoematicError):
    convert(folder, tmp_path / "new" / "out")
  assert set(tmp_path.rglob("*")) - {tmp_path / "new"} == set(before)


def test_a_checkpoint_holds_only_files_that_it_may_replace(
  gguf_file, hf_folder, tmp_path
):
  folder = hf_folder()
  for name in ("tokenizer.json", "chat_template.jinja"):
    (folder / name).write_text("{}")
  for number, source in enumerate((gguf_file(), folder)):
    out = tmp_path / f"out{number}"
    convert(source, out, format="nvfp4")
    assert {path.name for path in out.iterdir()} <= layout.FILES


def test_sizes_survive_the_metadata(checkpoint_path):
  metadata = load_checkpoint(checkpoint_path).metadata
  sizes = layout.Sizes(**metadata["sizes"])
  assert dataclasses.asdict(sizes) == metadata["sizes"]
  assert sizes.stored_bits == metadata["stored_bits"]
