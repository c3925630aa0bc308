"""Eagle3Head and Eagle3Drafter against a plain implementation: no cache, whole sequences, one path at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from optimized.models import eagle3, kv_cache, load_drafter, load_target, load_tokenizer
from optimized.models.eagle3 import Eagle3Drafter, Eagle3Head, llama_config
from optimized.models.packed_linear import pack_linears
from optimized.models.target import TargetModel
from optimized.trees import LevelNodes

ATOL = 2e-4  # float32 rounding; wrong positions, masks or features move the logits by > 1e-2
VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, DRAFT_VOCAB, THETA, EPS = 97, 32, 4, 2, 16, 41, 5e3, 1e-5

RAW = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,  # heads * head_dim is not the hidden size, on purpose
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 128,
}


def random_head(raw=RAW, seed: int = 3) -> Eagle3Head:
    torch.manual_seed(seed)
    head = Eagle3Head(llama_config(raw), raw["draft_vocab_size"])
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    return head.requires_grad_(False)


def rms_norm(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rotate(x, frequencies):
    """x [time, heads, head_dim], position = row; each pair (i, i + half) turns by its own frequency."""
    half = HEAD_DIM // 2
    angle = torch.arange(len(x))[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def plain_head(weights, embeddings, features, frequencies=None):
    """The head on a whole sequence: embeddings and features [time, hidden] -> output before the last norm."""
    if frequencies is None:
        frequencies = THETA ** (-torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    layer = {name.removeprefix("midlayer."): value for name, value in weights.items()}
    time = len(features)
    both = torch.cat(
        [rms_norm(embeddings, layer["input_layernorm.weight"]), rms_norm(features, layer["hidden_norm.weight"])], -1
    )
    q = rotate((both @ layer["self_attn.q_proj.weight"].T).view(time, HEADS, HEAD_DIM), frequencies)
    k = rotate((both @ layer["self_attn.k_proj.weight"].T).view(time, KV_HEADS, HEAD_DIM), frequencies)
    v = (both @ layer["self_attn.v_proj.weight"].T).view(time, KV_HEADS, HEAD_DIM)
    attended = torch.zeros(time, HEADS, HEAD_DIM)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        for t in range(time):
            weight = ((k[: t + 1, group] @ q[t, head]) / math.sqrt(HEAD_DIM)).softmax(0)
            attended[t, head] = weight @ v[: t + 1, group]
    hidden = features + attended.flatten(1) @ layer["self_attn.o_proj.weight"].T
    x = rms_norm(hidden, layer["post_attention_layernorm.weight"])
    gate, up = x @ layer["mlp.gate_proj.weight"].T, x @ layer["mlp.up_proj.weight"].T
    return hidden + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T


def plain_logits(weights, hidden):
    return rms_norm(hidden, weights["norm.weight"]) @ weights["lm_head.weight"].T


def plain_unroll(weights, embed, tokens, target_features, path, frequencies=None):
    """Logits after ``tokens`` and then ``path``: index t reads feature t and token t + 1; then its own outputs."""
    features = target_features @ weights["fc.weight"].T
    read = list(tokens[1:])
    hidden = plain_head(weights, embed[read], features, frequencies)
    for token in path:
        features = torch.cat([features, hidden[-1:]])
        read.append(token)
        hidden = plain_head(weights, embed[read], features, frequencies)
    return plain_logits(weights, hidden[-1])


def level(token_ids, parents, depth):
    ids = torch.tensor(token_ids)
    return LevelNodes(token_ids=ids, parents=torch.tensor(parents), valid=torch.ones_like(ids).bool(), depth=depth)


def drafter_and_embedding(head=None, **options):
    head = head or random_head(**options)
    torch.manual_seed(9)
    embedding = torch.nn.Embedding(VOCAB, HIDDEN)
    vocab_map = torch.arange(DRAFT_VOCAB) * 2 + 3
    return Eagle3Drafter(head, embedding, vocab_map, (0, 1, 2)), embedding.weight.detach()


def check_steps(drafter, embed, weights, lengths, steps=3, frequencies=None):
    """Several advances of ragged lengths, each followed by three levels; every row against the plain implementation."""
    generator = torch.Generator().manual_seed(sum(lengths))
    batch = len(lengths)
    texts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
    features = [torch.empty(0, 3 * HIDDEN) for _ in texts]
    drafter.reset(torch.tensor([text[0] for text in texts]))
    fresh_tokens = [text[1:] for text in texts]
    for step in range(steps):
        counts = torch.tensor([len(tokens) for tokens in fresh_tokens])
        width = int(counts.max()) + step  # more padding than necessary must not matter
        token_ids = torch.full((batch, width), 13)
        feature_rows = torch.full((batch, width, 3 * HIDDEN), 7.0)
        for b, tokens in enumerate(fresh_tokens):
            token_ids[b, : len(tokens)] = torch.tensor(tokens)
            new = torch.randn(len(tokens), 3 * HIDDEN, generator=generator)
            feature_rows[b, : len(tokens)] = new
            features[b] = torch.cat([features[b], new])
        logits = drafter.advance(token_ids, counts, feature_rows)
        for b, text in enumerate(texts):
            expected = plain_unroll(weights, embed, text, features[b], [], frequencies)
            torch.testing.assert_close(logits[b], expected, atol=ATOL, rtol=0)
        paths = [[[]] for _ in texts]
        for depth in (1, 2, 3):
            beam = 3
            parents = torch.zeros(batch, beam, dtype=torch.long)
            if depth > 1:
                parents = torch.randint(beam, (batch, beam), generator=generator)
            ids = torch.randint(VOCAB, (batch, beam), generator=generator)
            logits = drafter.expand(level(ids.tolist(), parents.tolist(), depth))
            paths = [[paths[b][parents[b, w]] + [int(ids[b, w])] for w in range(beam)] for b in range(batch)]
            for b, text in enumerate(texts):
                for w, path in enumerate(paths[b]):
                    expected = plain_unroll(weights, embed, text, features[b], path, frequencies)
                    torch.testing.assert_close(logits[b, w], expected, atol=ATOL, rtol=0)
        fresh_tokens = [torch.randint(VOCAB, (1 + (step + b) % 3,), generator=generator).tolist() for b in range(batch)]
        for text, tokens in zip(texts, fresh_tokens, strict=True):
            text += tokens
    return texts, features


@pytest.mark.parametrize("most", [1, 2, 16])
@pytest.mark.parametrize("lengths", [[7], [2, 6, 4], [5, 5]])
def test_eagle3_drafter_equals_the_plain_head_along_every_path(lengths, most, monkeypatch):
    monkeypatch.setattr(eagle3, "MOST_TO_PASS", most)  # of longer texts keys and values are all that is made
    drafter, embed = drafter_and_embedding()
    check_steps(drafter, embed, drafter.head.state_dict(), lengths)


@pytest.mark.parametrize("most", [1, 16])
@pytest.mark.parametrize("rows", [1, 3])
def test_eagle3_drafter_reads_long_texts_in_pieces(monkeypatch, rows, most):
    monkeypatch.setattr(kv_cache, "CHUNK_ROWS", rows)
    monkeypatch.setattr(eagle3, "MOST_TO_PASS", most)
    drafter, embed = drafter_and_embedding()
    widest, announce = [], kv_cache.TreeCache.announce
    spied = lambda cache, rows, *args: widest.append(rows) or announce(cache, rows, *args)  # noqa: E731
    monkeypatch.setattr(kv_cache.TreeCache, "announce", spied)
    check_steps(drafter, embed, drafter.head.state_dict(), [2, 9, 4])
    assert (widest[0], max(widest)) == (rows, 3)  # the beam is as wide as that


def test_eagle3_drafter_packed():
    head = random_head()
    weights = dict(head.state_dict())
    assert pack_linears(head, min_weights=1) == 1 + 7 + 1
    drafter, embed = drafter_and_embedding(head)
    assert drafter.vocab_size == DRAFT_VOCAB
    check_steps(drafter, embed, weights, [2, 6])


@pytest.mark.parametrize("layout", ["rope_scaling", "rope_parameters"])
def test_eagle3_head_honours_scaled_rope_in_either_layout(layout):
    scaling = {"rope_type": "linear", "factor": 4.0}
    raw = {key: value for key, value in RAW.items() if key != "rope_theta"}
    if layout == "rope_scaling":
        raw |= {"rope_theta": THETA, "rope_scaling": scaling}
    else:
        raw |= {"rope_parameters": scaling | {"rope_theta": THETA}}
    drafter, embed = drafter_and_embedding(raw=raw)
    frequencies = THETA ** (-torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM) / 4.0
    check_steps(drafter, embed, drafter.head.state_dict(), [4, 2], steps=2, frequencies=frequencies)


def test_eagle3_drafter_select_and_first_expand_again():
    drafter, embed = drafter_and_embedding()
    tokens = torch.arange(20, 32).view(3, 4)
    features = torch.randn(3, 3, 3 * HIDDEN, generator=torch.Generator().manual_seed(1))
    drafter.reset(tokens[:, 0])
    drafter.advance(tokens[:, 1:], torch.tensor([3, 1, 2]), features)
    drafter.expand(level([[1, 2], [3, 4], [5, 6]], [[0, 0]] * 3, 1))
    drafter.select(torch.tensor([0, 2]))
    logits = drafter.expand(level([[7, 8], [9, 10]], [[1, 0], [1, 1]], 2))
    weights = drafter.head.state_dict()
    for b, w, path in ((0, 0, [2, 7]), (0, 1, [1, 8]), (1, 0, [6, 9]), (1, 1, [6, 10])):
        original, count = ((0, 3), (2, 2))[b]
        expected = plain_unroll(
            weights, embed, tokens[original, : count + 1].tolist(), features[original, :count], path
        )
        torch.testing.assert_close(logits[b, w], expected, atol=ATOL, rtol=0)


def test_eagle3_drafter_prefers_its_own_embedding():
    head = Eagle3Head(llama_config(RAW), DRAFT_VOCAB, own_embedding=True)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.uniform_(-1, 1)
    drafter = Eagle3Drafter(head, torch.nn.Embedding(VOCAB, HIDDEN), None, (0, 1, 2))
    check_steps(drafter, head.embed_tokens.weight.detach(), head.state_dict(), [4], steps=1)
    with pytest.raises(ValueError, match="no embedding of its own"):
        Eagle3Drafter(random_head(), None, None, (0, 1, 2))


def test_eagle3_drafter_errors():
    drafter, _ = drafter_and_embedding()
    drafter.reset(torch.tensor([1]))
    with pytest.raises(ValueError, match=f"needs features of {3 * HIDDEN} numbers per position, got none"):
        drafter.advance(torch.tensor([[2]]), torch.tensor([1]), None)
    with pytest.raises(ValueError, match=f"got {HIDDEN} numbers"):
        drafter.advance(torch.tensor([[2]]), torch.tensor([1]), torch.zeros(1, 1, HIDDEN))
    drafter.advance(torch.tensor([[2]]), torch.tensor([1]), torch.zeros(1, 1, 3 * HIDDEN))
    with pytest.raises(ValueError, match="level 2 is out of order"):
        drafter.expand(level([[1]], [[0]], 2))
    with pytest.raises(ValueError, match="three feature layers"):
        Eagle3Drafter(random_head(), torch.nn.Embedding(VOCAB, HIDDEN), None, (1,))


def test_eagle3_drafter_on_a_target_s_own_features():
    """The whole chain on indices: prefill features, then the features of an accepted path of a tree."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    drafter, _ = drafter_and_embedding()
    drafter = Eagle3Drafter(drafter.head, model.get_input_embeddings(), None, (0, 2, 3))
    target = TargetModel(model, drafter.feature_layers)
    prompt, root, accepted, bonus = [5, 6, 7], 8, [9, 10], 11
    _, features = target.prefill([prompt])
    drafter.reset(torch.tensor([prompt[0]]))
    drafter.advance(torch.tensor([[*prompt[1:], root]]), torch.tensor([3]), features)
    rows = torch.tensor([[root, 50, *accepted]])  # row 1 is not accepted
    ancestors = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]]).bool()
    _, features = target.forward_tree(rows, torch.tensor([[0, 1, 1, 2]]), ancestors)
    walked = torch.tensor([[0, 2, 3]])
    target.commit(walked, torch.tensor([3]))
    logits = drafter.advance(torch.tensor([[*accepted, bonus]]), torch.tensor([3]), features[:, walked[0]])

    text = [*prompt, root, *accepted, bonus]
    with torch.no_grad():
        hidden = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    all_features = torch.cat([hidden[layer][0] for layer in (0, 2, 3)], dim=-1)
    embed = model.get_input_embeddings().weight.detach()
    expected = plain_unroll(drafter.head.state_dict(), embed, text, all_features, [])
    torch.testing.assert_close(logits[0], expected, atol=ATOL, rtol=0)


@pytest.mark.model
def test_embedded_head_overlaps_with_the_embedded_target():
    """A trained head tells right indexing from wrong: one token off leaves an overlap 1 - TV(p, q) of about 0.1."""
    target = load_target("embedded")
    drafter = load_drafter("embedded", target)
    target.feature_layers = drafter.feature_layers
    assert drafter.feature_layers == (2, 15, 27)
    tokenizer = load_tokenizer("embedded")
    chat = [{"role": "user", "content": "Give me five tips for saving money as a student."}]
    prompt = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
    torch.manual_seed(0)
    text = target.model.generate(
        torch.tensor([prompt]), max_new_tokens=80, do_sample=True, temperature=0.7, top_k=0, pad_token_id=2
    )[0].tolist()
    first, first_feature = target.prefill([text[:1]])
    ancestors = torch.ones(1, len(text) - 1, len(text) - 1).tril().bool()
    logits, features = target.forward_tree(torch.tensor([text[1:]]), torch.arange(len(text) - 1)[None], ancestors)
    law = torch.cat([first[:, None], logits], dim=1)[0].double().softmax(-1)
    features = torch.cat([first_feature, features], dim=1)

    def overlap(shift: int) -> float:
        overlaps = []
        for t in range(len(prompt), len(text) - 1):
            drafter.reset(torch.tensor(text[:1]))
            read = torch.tensor([text[1 - shift : t + 1 - shift]])
            drafted = drafter.advance(read, torch.tensor([t]), features[:, :t])
            proposal = torch.zeros(target.vocab_size, dtype=torch.float64)
            proposal[drafter.vocab_map] = drafted[0].double().softmax(-1)
            overlaps.append(float(torch.minimum(law[t], proposal).sum()))
        return sum(overlaps) / len(overlaps)

    right, one_off = overlap(0), overlap(1)
    assert right > 0.3, (right, one_off)
    assert right > 2 * one_off, (right, one_off)


@pytest.mark.model
def test_embedded_head_files_are_complete():
    from optimized.models.embedded import embedded_head_dir

    folder = Path(embedded_head_dir())
    assert {"config.json", "model.safetensors", "README.md", "LICENSE"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == 8192
