import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoematic_jax.checkpoints.safetensors_source import SafetensorsSource
from autoematic_jax.models.reference import decode
from autoematic_jax.models.reference import network
from autoematic_jax.models.reference import weights

CONFIG = network.NetworkConfig(
  vocab_size=96,
  hidden_size=32,
  intermediate_size=48,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
)
IDS = {"eos_id": 3, "pad_id": 0}


@pytest.fixture(scope="module")
def params():
  """Weights far from their first values, norms included."""
  tree = network.init(jax.random.key(0), CONFIG)
  leaves, structure = jax.tree.flatten(tree)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  noisy = [
    x + 0.1 * jax.random.normal(k, x.shape)
    for k, x in zip(keys, leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, noisy)


@pytest.fixture(scope="module")
def exported(params, tmp_path_factory):
  folder = tmp_path_factory.mktemp("exported")
  weights.save(folder, params, CONFIG, **IDS)
  return folder


@pytest.fixture(scope="module")
def tokens():
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.integers(4, 96, (3, 70)), jnp.int32)


def logits(params, tokens, dtype=jnp.float32):
  return network.logits(
    params, tokens, config=CONFIG, attention="xla", dtype=dtype
  )


def loss(params, tokens, counted):
  return network.loss_sum(
    params, tokens, counted, config=CONFIG, attention="xla"
  )


def test_the_usual_size():
  config = network.NetworkConfig()
  shapes = jax.eval_shape(lambda: network.init(jax.random.key(0), config))
  assert network.count_parameters(shapes) == 15_640_576
  dims = {n for x in jax.tree.leaves(shapes["layers"]) for n in x.shape[1:]}
  assert all(n % 16 == 0 for n in dims)


def test_an_untrained_network_knows_nothing(tokens):
  params = network.init(jax.random.key(0), CONFIG)
  total, count = loss(params, tokens, jnp.ones((3, 69), bool))
  assert count == 3 * 69
  assert float(total / count) == pytest.approx(np.log(96), rel=0.02)


def test_what_does_not_count_does_not_count(params, tokens):
  first = jnp.zeros((3, 69), bool).at[0, :5].set(True)
  rest = ~first
  parts = [loss(params, tokens, mask)[0] for mask in (first, rest)]
  whole = loss(params, tokens, first | rest)[0]
  np.testing.assert_allclose(sum(parts), whole, rtol=1e-5)


def test_weights_are_those_that_were_exported(params, exported):
  loaded, config = weights.load(exported)
  assert config == CONFIG
  rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  jax.tree.map(np.testing.assert_array_equal, rounded, loaded)


def test_rounding_the_weights_changes_no_bfloat16_result(
  params, exported, tokens
):
  loaded, _ = weights.load(exported)
  np.testing.assert_array_equal(
    logits(params, tokens, jnp.bfloat16),
    logits(jax.tree.map(jnp.asarray, loaded), tokens, jnp.bfloat16),
  )


def test_the_project_reads_the_file(exported):
  source = SafetensorsSource(exported)
  assert "lm_head.weight" not in source.names
  assert len(source.names) == 2 + 11 * CONFIG.num_layers
  assert {source.dtype(name) for name in source.names} == {
    np.dtype(jnp.bfloat16)
  }


@pytest.mark.slow
def test_logits_are_those_of_transformers(exported, tokens):
  torch = pytest.importorskip("torch", reason="parity needs torch")
  transformers = pytest.importorskip(
    "transformers", reason="parity needs transformers"
  )
  theirs = transformers.Qwen3ForCausalLM.from_pretrained(
    exported, dtype=torch.float32
  )
  with torch.no_grad():
    expected = theirs(torch.tensor(np.asarray(tokens))).logits.numpy()
  loaded, _ = weights.load(exported)
  found = logits(jax.tree.map(jnp.asarray, loaded), tokens)
  assert np.abs(expected).max() > 1
  np.testing.assert_allclose(found, expected, atol=1e-3)


def greedy(params, prompts, lengths, end):
  return decode.greedy(
    params,
    prompts,
    lengths,
    config=CONFIG,
    new_tokens=10,
    end=end,
    dtype=jnp.float32,
  )


def test_decoding_gives_what_running_all_again_gives(params):
  rng = np.random.default_rng(1)
  lengths = np.array([5, 9, 12], np.int32)
  prompts = jnp.asarray(rng.integers(4, 96, (3, 12)), jnp.int32)
  new = 10
  answers = greedy(params, prompts, jnp.asarray(lengths), end=3)
  assert answers.shape == (3, new)
  texts = np.zeros((3, 70), np.int32)
  for text, row, length, answer in zip(
    texts, prompts, lengths, answers, strict=True
  ):
    text[: length + new] = np.concatenate([row[:length], answer])
  likeliest = logits(params, jnp.asarray(texts)).argmax(-1)
  for found, length, answer in zip(likeliest, lengths, answers, strict=True):
    expected = found[length - 1 : length - 1 + new]
    ended = np.cumsum(np.asarray(answer) == 3) > 0
    before = np.concatenate([[False], ended[:-1]])
    np.testing.assert_array_equal(answer[~before], expected[~before])


def test_an_answer_ends_at_its_end(params):
  prompts = jnp.asarray(np.full((3, 12), 5), jnp.int32)
  lengths = jnp.asarray([12, 12, 12], jnp.int32)
  free = np.asarray(greedy(params, prompts, lengths, end=3)[0])
  end = int(free[2])
  stop = int(np.flatnonzero(free == end)[0])
  cut = np.asarray(greedy(params, prompts, lengths, end=end)[0])
  np.testing.assert_array_equal(cut[:stop], free[:stop])
  assert (cut[stop:] == end).all()
