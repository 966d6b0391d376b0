"""Calibration of a whole model, through `convert` and its command."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save_file

import autoematic_jax
from autoematic_jax import formats
from autoematic_jax.calibration import Calibrator
from autoematic_jax.calibration import calibration_tokens
from autoematic_jax.calibration import calibrator
from autoematic_jax.calibration import prefix
from autoematic_jax.checkpoints import convert
from autoematic_jax.checkpoints import load_checkpoint
from autoematic_jax.cli import main
from autoematic_jax.errors import AutoematicError
from autoematic_jax.errors import NonFiniteError
from autoematic_jax.errors import PrecisionError
from autoematic_jax.evaluation import teacher_forcing
from autoematic_jax.models import registry
from autoematic_jax.tokenizer import Tokenizer

CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 320,
  "hidden_size": 60,
  "intermediate_size": 96,
  "num_hidden_layers": 2,
  "num_attention_heads": 3,
  "num_key_value_heads": 1,
  "head_dim": 16,
  "max_position_embeddings": 128,
  "rms_norm_eps": 1e-5,
  "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory, trained_bpe):
  folder = tmp_path_factory.mktemp("source")
  rng = np.random.default_rng(0)
  tensors = {}
  for name, spec in registry.tensor_specs(
    registry.config_from_hf(CONFIG)
  ).items():
    tensors[name] = rng.standard_normal(spec.shape).astype(np.float32) * 0.15
  # Rows near one another make inputs that are correlated, as real ones are.
  base = rng.standard_normal((8, 60)).astype(np.float32)
  embedding = rng.standard_normal((320, 8)).astype(np.float32) @ base
  tensors["model.embed_tokens.weight"] = 0.2 * embedding
  save_file(tensors, folder / "model.safetensors")
  (folder / "config.json").write_text(json.dumps(CONFIG))
  trained_bpe.save(str(folder / "tokenizer.json"))
  return folder


def outputs(path, tokens):
  dense = autoematic_jax.load(path, dense=True, compute_dtype="float32")
  forced = np.full((2,), 32, np.int32)
  return np.stack(
    [
      jax.nn.log_softmax(
        dense.decoder.logits(
          teacher_forcing.hidden_states(
            dense, jnp.asarray(row), forced, "prefill"
          )[0]
        )
      )
      for row in tokens
    ]
  )


def test_calibrated_weights_stay_closer_to_the_model(source, tmp_path):
  rng = np.random.default_rng(1)
  text = rng.integers(0, 320, (16, 64)).astype(np.int32)
  fresh = rng.integers(0, 320, (2, 64)).astype(np.int32)
  convert(source, tmp_path / "fp32", format="fp32")
  convert(source, tmp_path / "rounded", format="autofp6")
  convert(
    source, tmp_path / "chosen", format="autofp6", calibrator=Calibrator(text)
  )
  exact = outputs(tmp_path / "fp32", fresh)
  kl = {
    name: (np.exp(exact) * (exact - outputs(tmp_path / name, fresh)))
    .sum(-1)
    .mean()
    for name in ("rounded", "chosen")
  }
  assert kl["chosen"] < 0.7 * kl["rounded"]
  made = json.loads((tmp_path / "chosen" / "autoematic.json").read_text())
  assert made["made"]["method"] == (
    "GPTQ on 16 x 64 tokens, 13 scale targets, 2 sweeps, corrected weights,"
    " refinement by sensitivity, masks may overlap"
  )


def test_the_command_takes_a_text(source, tmp_path, capsys):
  text = tmp_path / "text.txt"
  text.write_text("The capital of France is Paris, and so on. " * 40)
  words = ["autoematic", "convert", str(source), str(tmp_path / "out")]
  words += ["--calibrate", str(text), "--quiet", "--format", "nvfp4"]
  words += ["--calibration-samples", "3", "--calibration-tokens", "32"]
  args = main.parse_arguments(words)
  assert args.run(args) == 0
  assert "nvfp4" in capsys.readouterr().out
  made = json.loads((tmp_path / "out" / "autoematic.json").read_text())
  assert made["made"]["method"].startswith("GPTQ on 3 x 32 tokens")


def test_windows_lie_apart(source):
  tokenizer = Tokenizer.from_dir(source)
  text = "The capital of France is Paris. " * 10
  ids = tokenizer.encode(text)
  found = calibration_tokens(tokenizer, text, 3, 8)
  middle = (len(ids) - 8) // 2
  np.testing.assert_array_equal(found[0], ids[:8])
  np.testing.assert_array_equal(found[1], ids[middle : middle + 8])
  np.testing.assert_array_equal(found[2], ids[-8:])


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--calibrate", "/nowhere"], "--calibrate /nowhere"),
    (["--calibration-samples", "10"], "10 samples of 512 need 5120"),
    (["--calibration-samples", "0"], "at least 1 sample"),
  ],
)
def test_bad_input_is_named(source, tmp_path, words, message):
  text = tmp_path / "text.txt"
  text.write_text("Paris. ")
  command = ["autoematic", "convert", str(source), str(tmp_path / "out")]
  args = main.parse_arguments([*command, "--calibrate", str(text), *words])
  with pytest.raises(AutoematicError, match=message):
    args.run(args)
  assert not (tmp_path / "out").exists()


def calibrate(source, out, words=(), samples=6):
  text = out.parent / "calibration.txt"
  text.write_text("The capital of France is Paris, and so on. " * 40)
  command = ["autoematic", "convert", str(source), str(out), "--quiet"]
  command += ["--calibrate", str(text), "--calibration-tokens", "32"]
  command += ["--calibration-samples", str(samples), *words]
  args = main.parse_arguments(command)
  assert args.run(args) == 0


def weights_of(path):
  checkpoint = load_checkpoint(path)
  return [
    jax.tree.map(np.asarray, checkpoint.layer(layer)) for layer in range(2)
  ]


def test_an_interrupted_calibration_goes_on(source, tmp_path, monkeypatch):
  calibrate(source, tmp_path / "unbroken")
  calls = []
  layer = Calibrator.layer

  def interrupted(self, *args):
    calls.append(self)
    if len(calls) == 2:
      raise KeyboardInterrupt
    return layer(self, *args)

  out = tmp_path / "out"
  with monkeypatch.context() as patch:
    patch.setattr(Calibrator, "layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
      calibrate(source, out)
  assert not out.exists()
  with pytest.raises(AutoematicError, match="another kind; delete it"):
    calibrate(source, out, ["--rho", "0.1"])
  read = []
  with monkeypatch.context() as patch:
    inputs = prefix.Prefix.inputs
    patch.setattr(
      prefix.Prefix,
      "inputs",
      lambda self, *args, **kw: read.append(args) or inputs(self, *args, **kw),
    )
    calibrate(source, out)
  # One layer of four inputs, in the quantized model and in full precision.
  assert len(read) == 8
  jax.tree.map(
    np.testing.assert_array_equal,
    weights_of(out),
    weights_of(tmp_path / "unbroken"),
  )
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    "calibration.txt",
    "out",
    "unbroken",
  ]


def test_overflow_names_the_layer(source, tmp_path):
  tokens = np.zeros((1, 8), np.int32)
  tensors = load_file(source / "model.safetensors")
  tensors["model.layers.0.mlp.up_proj.weight"] *= 1e30
  tensors["model.layers.0.mlp.gate_proj.weight"] *= 1e30
  for file in source.iterdir():
    if file.suffix == ".json":
      shutil.copy(file, tmp_path)
  save_file(tensors, tmp_path / "model.safetensors")
  message = r"mlp\.down_proj\.weight of layer 0 reads holds NaN"
  with pytest.raises(NonFiniteError, match=message):
    convert(tmp_path, tmp_path / "out", calibrator=Calibrator(tokens))
  assert not (tmp_path / "out").exists()


def test_a_text_that_does_not_fit_is_refused(source, tmp_path, monkeypatch):
  monkeypatch.setattr(calibrator, "_available_bytes", lambda: 2**20)
  tokens = np.zeros((64, 32), np.int32)
  # Two streams 60 wide, and inputs of the widest projection, 96.
  message = r"64 x 32 tokens keeps 0.00177 GB .* 0.00105 GB of memory"
  with pytest.raises(AutoematicError, match=message):
    convert(source, tmp_path / "out", calibrator=Calibrator(tokens))
  assert not (tmp_path / "out").exists()


def test_the_papers_recipe_is_on_offer(source, tmp_path):
  calibrate(
    source,
    tmp_path / "paper",
    [
      *("--decoding", "fixed", "--no-scale-search", "--no-correction"),
      *("--sweeps", "0", "--even-refinement", "--disjoint-masks"),
    ],
  )
  made = json.loads((tmp_path / "paper" / "autoematic.json").read_text())
  assert made["decoding"] == "fixed"
  assert made["made"]["method"] == (
    "GPTQ on 6 x 32 tokens, 1 scale targets, 0 sweeps, original weights,"
    " refinement spread evenly, masks apart"
  )


def refined(path):
  """Refined subgroups of each projection of each layer."""
  return [
    {
      name: int(np.unpackbits(tensor.refinement_mask).sum())
      for name, tensor in layer.items()
      if isinstance(tensor, formats.QTensor)
    }
    for layer in weights_of(path)
  ]


def test_refinement_goes_where_it_matters(source, tmp_path):
  """Less sensitive layers give theirs up, and the whole takes no more bytes."""
  calibrate(source, tmp_path / "spread")
  calibrate(source, tmp_path / "even", ["--even-refinement"])
  spread, even = refined(tmp_path / "spread"), refined(tmp_path / "even")
  assert even[0] == even[1]
  assert spread[0] != spread[1]
  rows = {
    name: tensor.rows
    for name, tensor in weights_of(tmp_path / "even")[0].items()
    if isinstance(tensor, formats.QTensor)
  }

  def offsets(layers):
    return sum(n * rows[name] for layer in layers for name, n in layer.items())

  assert 0 < offsets(spread) <= offsets(even)
  model = autoematic_jax.load(tmp_path / "spread")
  result = autoematic_jax.generate(model, "Paris", max_new_tokens=3)
  assert len(result.token_ids[0]) <= 3


def test_unquantized_formats_take_no_calibration(source, tmp_path):
  tokens = np.zeros((1, 8), np.int32)
  with pytest.raises(PrecisionError, match="no calibration"):
    convert(
      source,
      tmp_path / "out",
      format="bf16",
      calibrator=Calibrator(tokens),
    )
