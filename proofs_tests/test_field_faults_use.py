"""Faults that users of speculative decoding met elsewhere, tried here: stopping and options, checkpoints, use."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import TopKLogitsWarper

from optimized import RheoConfig, RheoDecoder, SamplingParams, target_laws
from optimized.models import TargetModel, load_drafter
from optimized.models.checkpoints import feature_layers_of, load_head
from optimized.models.eagle3 import Eagle3Drafter
from optimized.models.loading import load_target
from optimized.target_laws import SamplingBatch, TargetLaws
from proofs_tests.tiny_pairs import causal_decoder, llama, near_copy
from proofs_tests.toy import random_logits
from proofs_tests.toy_models import PathDrafter, PathTarget

VOCAB = 13
CONFIG = RheoConfig(lead_tokens=1, branching=3, depth=3, tree_size=8)
ROOT = Path(__file__).parent.parent


class Letters:
    """A tokenizer whose token i is the i-th letter; token 0 is the end."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(96 + i) for i in ids if i)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [max(ord(letter) - 96, 1) % VOCAB for letter in text if letter.isalpha()]}

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return [1, *self(messages[-1]["content"])["input_ids"], 2]


def toy_decoder(
    config: RheoConfig = CONFIG, eos: Sequence[int] = (0,), bonus: float = 0.0, **options: Any
) -> RheoDecoder:
    """Logits are functions of the whole text; ``bonus`` is added to token 0's."""
    target_logits, noise = random_logits(1, VOCAB, "normal"), random_logits(2, VOCAB, "normal")

    def logits(path: tuple[int, ...]) -> np.ndarray:
        return target_logits(path) + np.float32(bonus) * (np.arange(VOCAB) == 0)

    drafter = PathDrafter(VOCAB, lambda path: logits(path) + np.float32(0.4) * noise(path))
    return RheoDecoder(PathTarget(VOCAB, logits, eos=eos), drafter, config=config, **options)  # type: ignore[arg-type]


# Stopping and options


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 3, 3, 8), (0, 1, 1, 1), (1, 2, 5, 5)])
def test_23_min_new_tokens_masks_one_row_too_many_or_counts_steps(
    temperature: float, shape: tuple[int, int, int, int]
) -> None:
    """vllm#41768. Right: a text of n tokens and then EOS, which is all but certain wherever it is allowed."""
    m, branching, depth, size = shape
    for end in ({"eos": (0,)}, {"eos": ()}):
        one = toy_decoder(RheoConfig(m, branching, depth, size), bonus=60.0, **end)
        for n in range(9):
            params = SamplingParams(temperature, seed=n, min_new_tokens=n, max_new_tokens=30, stop_token_ids=(0,))
            [result] = one.generate([[1, 2]], params)
            assert len(result.token_ids) == n + 1
            assert result.token_ids[-1] == 0
            assert 0 not in result.token_ids[:-1]


def test_24_penalties_are_ignored_or_applied_to_the_last_token_only() -> None:
    """TensorRT-LLM#17701. Right: the chain by hand, with every token of prompt, output and path penalised."""
    target_logits = random_logits(1, VOCAB, "normal")

    def chain(prompt: list[int], penalised: slice) -> list[int]:
        text = list(prompt)
        for _ in range(20):
            z = target_logits(tuple(text)).astype(np.float64)
            for token in set(text[penalised]):
                z[token] = z[token] / 1.7 if z[token] >= 0 else z[token] * 1.7
            text.append(int(z.argmax()))
        return text[len(prompt) :]

    for prompt in ([1, 2, 3], [4], [5, 6, 7, 8]):
        params = SamplingParams(temperature=0, repetition_penalty=1.7, max_new_tokens=20)
        [result] = toy_decoder(eos=()).generate([prompt], params)
        assert list(result.token_ids) == chain(prompt, slice(None))
        assert chain(prompt, slice(None)) not in (chain(prompt, slice(-1, None)), chain(prompt, slice(0, 0)))
        assert sum(result.metrics.accepted_per_level) > 0
    with pytest.raises(TypeError, match="presence_penalty"):
        SamplingParams(presence_penalty=0.5)  # type: ignore[call-arg]


def test_25_top_k_ties() -> None:
    """flashinfer#3774 against sglang#33539. Right: transformers' rule, all that tie with the k-th stay: three."""
    logits = torch.tensor([0.4, 0.3, 0.3, 0.0]).log().view(1, 1, 4)
    laws = TargetLaws(logits, SamplingBatch.from_params([SamplingParams(top_k=2)], [[0]], 4))
    torch.testing.assert_close(laws(torch.tensor([0]))[0], torch.tensor([0.4, 0.3, 0.3, 0.0]).double())
    kept = TopKLogitsWarper(2)(torch.tensor([[0]]), logits[0].clone()).isfinite()
    assert torch.equal(laws.masked_logits()[0].isfinite(), kept)
    assert kept.tolist() == [[True, True, True, False]]


# Checkpoints

HIDDEN, TARGET_VOCAB, DRAFT_VOCAB, LAYERS = 32, 101, 37, 8
LAYER = {
    "vocab_size": TARGET_VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e3, "max_position_embeddings": 64,
}  # fmt: skip
RAW = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB} | LAYER


def head_tensors(prefix: str = "midlayer.", draft_vocab: int = DRAFT_VOCAB) -> dict[str, Tensor]:
    """Shapes written out from the official layout."""
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        f"{prefix}self_attn.q_proj.weight": (HIDDEN, 2 * HIDDEN),
        f"{prefix}self_attn.k_proj.weight": (16, 2 * HIDDEN),
        f"{prefix}self_attn.v_proj.weight": (16, 2 * HIDDEN),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{prefix}mlp.gate_proj.weight": (48, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (48, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, 48),
        f"{prefix}hidden_norm.weight": (HIDDEN,),
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (draft_vocab, HIDDEN),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) / HIDDEN**0.5 for name, shape in shapes.items()}
    if draft_vocab != TARGET_VOCAB:
        ids = torch.arange(draft_vocab) * 2 + 5
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.isin(torch.arange(TARGET_VOCAB), ids)
    return tensors


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def drafted(folder: Path) -> Tensor:
    """The head's logits after a text with made-up features, and after a node below it."""
    head, vocab_map = load_head(folder, HIDDEN, TARGET_VOCAB)
    torch.manual_seed(1)
    drafter = Eagle3Drafter(head, torch.nn.Embedding(TARGET_VOCAB, HIDDEN), vocab_map, (2, 4, 5))
    drafter.reset(torch.tensor([1]))
    features = torch.randn(1, 6, 3 * HIDDEN, generator=torch.Generator().manual_seed(2))
    return drafter.advance(torch.arange(10, 16)[None], torch.tensor([6]), features)[0]


def tiny_target(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=TARGET_VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
                         num_attention_heads=4, **changes)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_26_unmatched_keys_leave_random_weights(tmp_path: Path) -> None:
    """speculators#1114. Right: an error that names the weights, for heads, for causal drafts and for targets alike."""
    for name in head_tensors():
        if name not in ("d2t", "t2d"):
            tensors = {key: value for key, value in head_tensors().items() if key != name}
            with pytest.raises(ValueError, match=f"missing {re.escape(name)}|EAGLE-1"):
                load_head(write(tmp_path / "head", RAW, tensors), HIDDEN, TARGET_VOCAB)
    more = head_tensors() | {"midlayer.self_attn.q_norm.weight": torch.ones(8)}
    with pytest.raises(ValueError, match=r"unexpected midlayer\.self_attn\.q_norm\.weight"):
        load_head(write(tmp_path / "head", RAW, more), HIDDEN, TARGET_VOCAB)
    folder = tiny_target(tmp_path / "target")
    target = load_target(folder, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("layers.3.mlp", "layers.3.ffn"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    missing = r"lacks 3 weights of LlamaForCausalLM: model\.layers\.3\.mlp\.down_proj\.weight, "
    with pytest.raises(ValueError, match=missing):
        load_target(folder)
    with pytest.raises(ValueError, match=missing):
        load_drafter(folder, target)


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}])
def test_26_rope_scaling_is_dropped(tmp_path: Path, scaling: dict[str, Any]) -> None:
    """speculators#574, executorch#20149. Right: the frequencies theta^(-2i/d) / 4 in either layout, old key or new."""
    without = {key: value for key, value in RAW.items() if key != "rope_theta"}
    layouts = [RAW | {"rope_scaling": scaling}, without | {"rope_parameters": scaling | {"rope_theta": 5e3}}]
    expected = 5e3 ** (-torch.arange(4) / 4) / 4
    for index, raw in enumerate(layouts):
        head, _ = load_head(write(tmp_path / f"head{index}", raw, head_tensors()), HIDDEN, TARGET_VOCAB)
        torch.testing.assert_close(head.rotary_emb.inv_freq, expected)
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5, which is not supported"):
        load_head(write(tmp_path / "half", RAW | {"partial_rotary_factor": 0.5}, head_tensors()), HIDDEN, TARGET_VOCAB)
    rope = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5, which is not supported"):
        load_head(write(tmp_path / "within", RAW | rope, head_tensors()), HIDDEN, TARGET_VOCAB)
    with pytest.raises(ValueError, match="rope_scaling must be an object, got 'linear'"):
        load_head(write(tmp_path / "text", RAW | {"rope_scaling": "linear"}, head_tensors()), HIDDEN, TARGET_VOCAB)


def test_26_no_vocabulary_map_where_the_vocabularies_are_equal(tmp_path: Path) -> None:
    """executorch#20149. Right: no d2t needed, and none made up; where they differ its absence is an error."""
    raw = RAW | {"draft_vocab_size": TARGET_VOCAB}
    _, vocab_map = load_head(write(tmp_path / "a", raw, head_tensors(draft_vocab=TARGET_VOCAB)), HIDDEN, TARGET_VOCAB)
    assert vocab_map is None
    tensors = {name: tensor for name, tensor in head_tensors().items() if name not in ("d2t", "t2d")}
    with pytest.raises(ValueError, match="has no d2t"):
        load_head(write(tmp_path / "b", RAW, tensors), HIDDEN, TARGET_VOCAB)


def test_26_the_speculators_layout(tmp_path: Path) -> None:
    """Right: the logits of the same weights in the official layout; its layer's config leaves out what is default."""
    official = drafted(write(tmp_path / "official", RAW, head_tensors()))
    layer = {key: value for key, value in LAYER.items() if key != "rms_norm_eps"} | {
        "model_type": "llama", "rms_norm_eps": 1e-5, "num_hidden_layers": 1,
    }  # fmt: skip
    raw = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "somewhere"}},
    }
    tensors = head_tensors("layers.0.")
    folder = write(tmp_path / "speculators", raw, tensors)
    assert torch.equal(drafted(folder), official)
    assert not torch.allclose(drafted(write(tmp_path / "n", raw | {"norm_before_residual": True}, tensors)), official)
    target = load_target(tiny_target(tmp_path / "target"), dtype=torch.float32)
    assert load_drafter(folder, target).feature_layers == (1, 3, 6)
    shorter = {key: value for key, value in layer.items() if key != "max_position_embeddings"}  # 2048 by default
    head, _ = load_head(
        write(tmp_path / "s", raw | {"transformer_layer_config": shorter}, tensors), HIDDEN, TARGET_VOCAB
    )
    assert head.config.max_position_embeddings == 2048
    for change, message in (
        ({"norm_before_fc": True}, "norm_before_fc=True, which is not supported"),
        ({"transformer_layer_config": layer | {"model_type": "qwen3"}}, "layers of type qwen3"),
        ({"speculators_model_type": "eagle"}, "a speculator of type eagle"),
    ):
        with pytest.raises(ValueError, match=message):
            load_head(write(tmp_path / "refused", raw | change, tensors), HIDDEN, TARGET_VOCAB)
    with pytest.raises(ValueError, match=r"unexpected layers\.1\.mlp"):
        load_head(write(tmp_path / "two", raw, tensors | {"layers.1.mlp.up_proj.weight": torch.zeros(2)}), HIDDEN,
                  TARGET_VOCAB)  # fmt: skip


def test_27_feature_layers_are_shifted_by_one(tmp_path: Path) -> None:
    """sglang#32334. Right: ``output_hidden_states[i]``, what enters layer i; SpecForge counts what leaves it."""
    model = llama()
    _, features = TargetModel(model, (1, 2, 3)).prefill([[5, 6, 7, 8]])
    with torch.no_grad():
        hidden = model(torch.tensor([[5, 6, 7, 8]]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(features, torch.cat([hidden[i] for i in (1, 2, 3)], dim=-1), atol=1e-4, rtol=0)
    assert feature_layers_of({}) is None
    assert feature_layers_of({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}) == (2, 4, 5)
    assert feature_layers_of({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}) == (2, 4, 5)
    target = load_target(tiny_target(tmp_path / "target"), dtype=torch.float32)
    for ids, layers in (([0, 2, 6], (1, 3, 7)), (None, (2, 4, 5))):
        nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}} if ids else {}
        assert load_drafter(write(tmp_path / "head", RAW | nested, head_tensors()), target).feature_layers == layers
    with pytest.raises(ValueError, match="must be a list of integers"):
        feature_layers_of({"eagle_aux_hidden_state_layer_ids": "2,4,5"})
    beyond = load_drafter(write(tmp_path / "h", RAW, head_tensors()), target, feature_layers=(2, 4, 8))
    with pytest.raises(ValueError, match=r"feature layers \[8\] do not exist"):
        RheoDecoder(target, beyond)


def test_27_an_older_head_is_loaded_as_eagle_3(tmp_path: Path) -> None:
    """SpecForge#879. Right: refused, by what its weights are, whether its config says so or calls itself a Llama."""
    old = {
        "fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN),
        "layers.0.self_attn.q_proj.weight": torch.zeros(HIDDEN, HIDDEN),
    }
    target = load_target(tiny_target(tmp_path / "target"), dtype=torch.float32)
    with pytest.raises(ValueError, match="EAGLE-1 or EAGLE-2 head"):
        load_drafter(write(tmp_path / "new", RAW, old), target)
    llama_config = LAYER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    folder = write(tmp_path / "old", llama_config, old)
    save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks \d+ weights of LlamaForCausalLM: .*it holds fc.weight, as EAGLE heads"
    ):
        load_drafter(folder, target)


@pytest.mark.parametrize(("target_vocab", "draft_vocab"), [(64, 60), (60, 64)])
def test_28_vocabularies_padded_to_different_sizes(target_vocab: int, draft_vocab: int) -> None:
    """transformers#45307. Right: plain decoding's greedy chain, through tokens that only one of the two knows."""
    model = llama(vocab_size=target_vocab, eos_token_id=None)
    draft = near_copy(model)
    wide = llama(vocab_size=draft_vocab, eos_token_id=None)
    shared = min(target_vocab, draft_vocab)
    for mine, theirs in ((wide.model.embed_tokens, draft.model.embed_tokens), (wide.lm_head, draft.lm_head)):
        mine.weight[:shared] = theirs.weight[:shared]
    wide.model.layers, wide.model.norm = draft.model.layers, draft.model.norm
    one = causal_decoder(model=model, draft=wide)
    bias = {62: 4.0, 63: 4.0} if target_vocab == 64 else {}
    params = SamplingParams(temperature=0, logit_bias=bias, max_new_tokens=40)
    [result] = one.generate([[5, 6, 7]], params)
    [plain] = RheoDecoder(TargetModel(model), None).generate([[5, 6, 7]], params)
    assert result.token_ids == plain.token_ids
    assert not bias or set(bias) & set(result.token_ids)
    assert sum(result.metrics.accepted_per_level) > 3
    for tree, _, _ in one.trace([5, 6, 7], SamplingParams(seed=1), steps=5):
        assert max(tree.token_ids) < shared


# Batch, speed, use


def test_29_top_p_of_one_sorts_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer#1514. Right: no sort where nobody asked for one, and only the rows of those who did."""
    sorted_rows: list[int] = []
    monkeypatch.setattr(target_laws, "_sorted_rows", lambda law: sorted_rows.append(len(law)) or law.sort(-1).values)
    toy_decoder().generate([[1], [2], [3]], SamplingParams(top_p=1.0, temperature=0.7, max_new_tokens=6))
    assert sorted_rows == []
    asked = [SamplingParams(top_p=p, max_new_tokens=6, min_new_tokens=6) for p in (1.0, 0.9, 1.0)]
    toy_decoder().generate([[1], [2], [3]], asked)
    assert set(sorted_rows) == {1}


def test_29_one_sampled_request_sends_the_whole_batch_to_plain_decoding() -> None:
    """vllm#24343, transformers#42655. Right: in a mixed batch of 32 each request accepts as many tokens as alone.

    What a batch costs is in the metrics (pegainfer#512): passes, tokens per pass and seconds by phase.
    """
    kinds = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.5, "top_k": 3}, {"top_p": 0.8}]
    params = [SamplingParams(seed=i, max_new_tokens=12, min_new_tokens=12, **kinds[i % 4]) for i in range(32)]
    prompts = [[1 + i % 12, 1 + i // 12] for i in range(32)]
    together = toy_decoder().generate(prompts, params)
    for i in range(0, 32, 3):
        [alone] = toy_decoder().generate([prompts[i]], params[i])
        assert together[i].token_ids == alone.token_ids
        assert together[i].metrics.accepted_per_level == alone.metrics.accepted_per_level
        assert sum(alone.metrics.accepted_per_level) > 0
    metrics = together[0].metrics
    assert metrics.tau > 1
    assert min(metrics.draft_seconds, metrics.target_seconds, metrics.sampling_seconds) > 0
    for word in ("tokens per pass", "draft", "target", "sampling", "tokens per second"):
        assert word in str(metrics)


def test_30_acceptance_rates_above_one_and_counts_that_do_not_add_up() -> None:
    """llama.cpp#24536. Right: accepted + passes = tokens before truncation, rates per level within [0, 1]."""
    for seed in range(6):
        params = SamplingParams(seed=seed, max_new_tokens=23, stop_token_ids=(5,))
        metrics = toy_decoder().generate([[1, 2]], params)[0].metrics
        assert sum(metrics.accepted_per_level) + metrics.target_passes == metrics.emitted_tokens
        assert 1 + metrics.emitted_tokens >= metrics.generated_tokens
        assert all(0 <= rate <= 1 for rate in metrics.acceptance_rates)
        assert math.isnan(metrics.probe_acceptance_rate) or 0 <= metrics.probe_acceptance_rate <= 1


def test_30_text_is_cut_at_a_stop_string_and_ids_and_logprobs_are_not() -> None:
    """vllm#47616. Right: ids and logprobs end with the token that completed the string, the text before it."""
    params = SamplingParams(seed=4, max_new_tokens=40, logprobs=1)
    one = toy_decoder(tokenizer=Letters(), eos=())
    [whole] = one.generate([[1, 2]], params)
    inside = 0
    for start in range(3, 30):
        stop = whole.text[start : start + 2]
        [result] = one.generate([[1, 2]], replace(params, stop=stop))
        assert (result.text, result.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
        assert Letters().decode(result.token_ids) == result.text + stop
        assert result.token_ids == whole.token_ids[: len(result.token_ids)]
        assert result.logprobs is not None
        assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
        inside += 1 + result.metrics.emitted_tokens > len(result.token_ids)
    assert inside > 3  # so many ends fell inside an accepted path


def test_30_triton_is_needed_to_import_on_a_cpu() -> None:
    """vllm#15030. Right: import and generation without triton and CuPy."""
    script = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "cupy"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import optimized.cli
from proofs_tests.test_field_faults_use import toy_decoder
from optimized import SamplingParams
[result] = toy_decoder().generate([[1, 2]], SamplingParams(seed=1, max_new_tokens=5, min_new_tokens=5))
assert len(result.token_ids) == 5 and "triton" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("temperature", ["0.8", "0.5", "0"])
def test_30_the_example_in_the_readme_crashes_at_another_temperature(
    temperature: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """EAGLE#291. Right: the README's own code runs, at T = 0.5 and 0 too (with a toy pair in place of the real one)."""
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    made: list[RheoConfig] = []

    def from_pretrained(target: str, draft: str, config: RheoConfig) -> RheoDecoder:
        made.append(config)
        return toy_decoder(config, tokenizer=Letters())

    monkeypatch.setattr(RheoDecoder, "from_pretrained", from_pretrained)
    assert "temperature=0.8" in code
    exec(code.replace("temperature=0.8", f"temperature={temperature}"), {})
    assert made
    assert "tau = " in capsys.readouterr().out
