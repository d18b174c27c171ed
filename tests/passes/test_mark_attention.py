"""Every attention call that is fully understood becomes a site, and the marked graph computes what eager computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from fullgraph_compile import ops
from fullgraph_compile.passes.common import is_size, op_name, placeholders, value_of
from fullgraph_compile.passes.mark_attention import Marked, mark_attention
from tests.tracing import TOKENS, trace

REQUESTS: list[Tensor] = []
"""The request of each token, for the attention of these tests."""


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None,
    scale: float, left: int, right: int, softcap: float, site: int,
) -> Tensor:  # fmt: skip
    """The op's definition as one dense softmax in float64."""
    assert sinks is None
    assert slopes is None
    assert site >= 0
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    query, key = torch.arange(len(q))[:, None], torch.arange(len(q))
    seen = REQUESTS[0][:, None] == REQUESTS[0]
    if left >= 0:
        seen = seen & (key >= query - left)
    if right >= 0:
        seen = seen & (key <= query + right)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype).contiguous()


@pytest.fixture(autouse=True)
def direct_attention() -> Iterator[None]:
    before = ops._direct
    ops.set_direct_attention(dense_attention)
    yield
    ops._direct = before


def run(marked: Marked, given: dict[str, Tensor]) -> Any:
    """Run the marked graph on its example inputs, with those in ``given`` (by the end of their names) replaced."""
    tokens = next(max(x.shape) for x in given.values()) if "x" not in given else given["x"].shape[2]
    restarts = torch.zeros(tokens, dtype=torch.long)
    if marked.requests == "positions":
        restarts[1:] = (given["position_ids"].flatten().diff() != 1).cumsum(0)
    REQUESTS[:] = [restarts]
    examples = dict(zip(placeholders(marked.gm), marked.gm.meta["example_inputs"], strict=True))
    inputs = [
        tokens if is_size(value_of(node)) else next((x for n, x in given.items() if node.name.endswith(f"_{n}_")), old)
        for node, old in examples.items()
    ]
    with torch.no_grad():
        return marked.gm(*inputs)


def marked_sdpa(fn: Callable[..., Tensor], *inputs: Tensor, **keywords: Any) -> Marked:
    gm, token = trace(fn, *inputs, **{"backed": True, **keywords})
    return mark_attention(gm, token)


def refusals(fn: Callable[..., Tensor], *inputs: Tensor, **keywords: Any) -> str:
    marked = marked_sdpa(fn, *inputs, **keywords)
    assert not marked.sites
    assert [op_name(n) for n in marked.gm.graph.nodes].count("scaled_dot_product_attention") == len(marked.refusals)
    return "; ".join(map(str, marked.refusals))


# -- models of transformers, on their stock attention -----------------------------------------------------------------

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
SHORT: dict[str, Any] = {**GROUPED, "num_hidden_layers": 1}

MODELS: dict[str, tuple[Callable[[], nn.Module], list[str], int, str]] = {
    "llama": (lambda: hf.LlamaModel(hf.LlamaConfig(**GROUPED)), ["causal"] * 2, 2, "positions"),
    "qwen2": (lambda: hf.Qwen2Model(hf.Qwen2Config(**SHORT)), ["causal"], 2, "positions"),
    "qwen3": (lambda: hf.Qwen3Model(hf.Qwen3Config(**SHORT, head_dim=8)), ["causal"], 2, "positions"),
    "mistral": (lambda: hf.MistralModel(hf.MistralConfig(**SHORT, sliding_window=4)), ["causal window of 4"], 2,
                "positions"),
    # The stock sdpa attention of transformers leaves the soft cap out, so the site has none.
    "gemma2": (lambda: hf.Gemma2Model(hf.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=4, query_pre_attn_scalar=8, attn_implementation="sdpa")),
               ["causal window of 4", "causal"], 2, "positions"),
    "phi3": (lambda: hf.Phi3Model(hf.Phi3Config(**SHORT, sliding_window=262144)), ["causal window of 262144"], 2,
             "positions"),
    "gpt2": (lambda: hf.GPT2Model(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, bos_token_id=1,
                                                eos_token_id=2)), ["causal"] * 2, 4, "positions"),
    "opt": (lambda: hf.OPTModel(hf.OPTConfig(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
                                             vocab_size=97, word_embed_proj_dim=32, max_position_embeddings=64)),
            ["causal"] * 2, 4, "one"),
    "bert": (lambda: hf.BertModel(hf.BertConfig(**SMALL), add_pooling_layer=False), ["two-sided"] * 2, 4, "one"),
    "modernbert": (lambda: hf.ModernBertModel(hf.ModernBertConfig(**SMALL, local_attention=6, cls_token_id=1,
                                                                  sep_token_id=2)),
                   ["two-sided", "two-sided window of 3+3"], 4, "one"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_stock_transformers_models_are_marked_and_equal_eager(name: str) -> None:
    build, masks, kv_heads, requests = MODELS[name]
    if name == "gemma2" and not hf.Gemma2PreTrainedModel._supports_sdpa:
        pytest.skip("this transformers does not run Gemma 2 on its sdpa attention: that leaves the soft cap out")
    model = build().eval()
    for parameter in model.parameters():
        # Weights as they are drawn make attention nearly uniform: a wrong mask would hardly show.
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    keywords: dict[str, Any] = {} if "bert" in name else {"use_cache": False}
    ids, run_of_one = torch.randint(3, 97, (1, TOKENS)), torch.arange(TOKENS)[None]
    with torch.no_grad():
        gm, token = trace(model, backed=True, input_ids=ids, position_ids=run_of_one, **keywords)
    marked = mark_attention(gm, token)

    assert not marked.refusals
    assert [site.mask for site in marked.sites] == masks
    assert [(s.index, s.heads, s.kv_heads, s.head_size, s.value_head_size) for s in marked.sites] == [
        (i, 4, kv_heads, 8, 8) for i in range(len(masks))
    ]
    assert len({s.module for s in marked.sites}) == len(masks)
    assert marked.requests == requests
    assert (marked.positions is not None) == (requests == "positions")
    assert not [n for n in marked.gm.graph.nodes if op_name(n) in ("cumsum", "le", "scaled_dot_product_attention")]
    longer = torch.cat([torch.arange(9), torch.arange(3), torch.arange(7, 11)])[None]
    for given in (run_of_one, longer):
        ids = torch.randint(3, 97, given.shape)
        with torch.no_grad():
            expected = model(input_ids=ids, position_ids=given, **keywords)[0]
        got = run(marked, {"input_ids": ids, "position_ids": given})[0]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_padding_mask_given_to_a_model_is_refused_with_the_way_out() -> None:
    model = hf.LlamaModel(hf.LlamaConfig(**SHORT)).eval()
    ids = torch.randint(3, 97, (1, TOKENS))
    with torch.no_grad():
        gm, token = trace(model, backed=True, input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    marked = mark_attention(gm, token)
    assert not marked.sites
    assert len(marked.refusals) == 1
    assert "a padding mask was given (l_kwargs_attention_mask_): pack the batch with fgc.compile" in str(
        marked.refusals[0]
    )
    assert marked.refusals[0].module == "layers.0.self_attn"
    assert "sdpa_attention.py" in marked.refusals[0].source


def test_a_model_without_positions_is_one_request() -> None:
    model = hf.LlamaModel(hf.LlamaConfig(**SHORT)).eval()
    with torch.no_grad():
        gm, token = trace(model, backed=True, input_ids=torch.randint(3, 97, (1, TOKENS)), use_cache=False)
    marked = mark_attention(gm, token)
    assert (marked.requests, marked.positions, len(marked.sites)) == ("one", None, 1)


# -- calls of scaled_dot_product_attention ----------------------------------------------------------------------------

sdpa = F.scaled_dot_product_attention
X = torch.randn(1, 4, TOKENS, 8)


def causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()


def half(x: Tensor) -> Tensor:
    return x[:, 1:3] * 0.5


CALLS: dict[str, tuple[Callable[[Tensor], Tensor], str, int]] = {
    "is_causal": (lambda x: sdpa(x, x, x, is_causal=True), "causal", 4),
    "two-sided": (lambda x: sdpa(x, x, x), "two-sided", 4),
    "scale": (lambda x: sdpa(x, x, x, is_causal=True, scale=0.7), "causal", 4),
    "positional arguments": (lambda x: sdpa(x, x, x, None, 0.0, True), "causal", 4),
    "grouped": (lambda x: sdpa(x, half(x), half(x) * 2, is_causal=True, enable_gqa=True), "causal", 2),
    "mask": (lambda x: sdpa(x, x, x, causal(x)), "causal", 4),
    "additive mask": (lambda x: sdpa(
        x, x, x, torch.zeros(x.shape[2], x.shape[2]).masked_fill(~causal(x), float("-inf"))), "causal", 4),
    "repeat_interleave": (lambda x: sdpa(
        x, half(x).repeat_interleave(2, dim=1), (half(x) + 1).repeat_interleave(2, 1), is_causal=True), "causal", 2),
    "expanded by unsqueeze": (lambda x: sdpa(
        x, *(y.unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(1, 4, -1, 8) for y in (half(x), half(x) * 2)),
        is_causal=True), "causal", 2),
    "repeated in another order": (lambda x: sdpa(
        x, half(x).repeat(1, 2, 1, 1), half(x).repeat(1, 2, 1, 1), is_causal=True), "causal", 4),
    "only keys repeated": (lambda x: sdpa(
        x, half(x).repeat_interleave(2, dim=1), x, is_causal=True), "causal", 4),
    "one key head": (lambda x: sdpa(
        x, x[:, :1] * 2, x[:, 1:2], is_causal=True, enable_gqa=True), "causal", 1),
    "flat": (lambda x: sdpa(x[0], x[0] + 1, x[0], is_causal=True), "causal", 4),
    "narrow values": (lambda x: sdpa(x, x, x[..., :6], is_causal=True), "causal", 4),
    "seen through a view": (lambda x: sdpa(x, x, x, causal(x)).view(4, -1, 8), "causal", 4),
    "turned to rows": (lambda x: sdpa(x, x, x).transpose(1, 2).reshape(1, -1, 32),
                       "two-sided", 4),
    "rows in the last dim": (lambda x: sdpa(
        *(x.transpose(2, 3).contiguous().transpose(2, 3),) * 3, is_causal=True), "causal", 4),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_replaced_and_equal_eager(name: str) -> None:
    fn, mask, kv_heads = CALLS[name]
    marked = marked_sdpa(fn, X)
    assert not marked.refusals
    (site,) = marked.sites
    assert (site.mask, site.heads, site.kv_heads, marked.requests) == (mask, 4, kv_heads, "one")
    assert site.scale == (0.7 if name == "scale" else 1 / math.sqrt(8))
    call = next(n for n in marked.gm.graph.nodes if n.target is ops.attention)
    assert call.args[-1] == 0
    assert "test_mark_attention" in call.meta["stack_trace"]
    assert all(n.meta["example_value"] is not None for n in marked.gm.graph.nodes if n.op.startswith("call"))
    left = {op_name(n) for n in marked.gm.graph.nodes}
    assert not left & {"tril", "repeat_interleave", "expand"} or name == "only keys repeated"
    longer = torch.randn(1, 4, TOKENS + 5, 8)
    torch.testing.assert_close(run(marked, {"x": longer})[0], fn(longer))


def test_the_incoming_graph_is_unchanged_and_marking_twice_gives_the_same_b107() -> None:
    def fn(x: Tensor) -> Tensor:
        return sdpa(x, half(x), half(x), causal(x), enable_gqa=True)

    gm, token = trace(fn, X, backed=True)
    before = str(gm.graph), [dict(n.meta) for n in gm.graph.nodes]
    first, second = mark_attention(gm, token), mark_attention(gm, token)
    again = mark_attention(first.gm, token)
    assert (str(gm.graph), [dict(n.meta) for n in gm.graph.nodes]) == before
    assert str(first.gm.graph) == str(second.gm.graph) == str(again.gm.graph)
    assert first.sites == second.sites
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    assert [n.name for n in first.gm.graph.nodes if n.op == "placeholder"] == names


def test_a_mask_that_feeds_something_else_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        mask = causal(x)
        return sdpa(x, x, x, mask) + mask.sum()

    marked = marked_sdpa(fn, X)
    assert len(marked.sites) == 1
    assert {"tril", "sum"} <= {op_name(n) for n in marked.gm.graph.nodes}


def test_a_mask_that_is_written_to_is_removed_with_its_writes() -> None:
    def fn(x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[2], x.shape[2], dtype=torch.bool)
        mask[:, :] = causal(x)
        return sdpa(x, x, x, mask)

    marked = marked_sdpa(fn, X)
    assert len(marked.sites) == 1
    assert "setitem" not in {op_name(n) for n in marked.gm.graph.nodes}


def test_a_mask_that_changes_between_layers_is_refused_the_second_time() -> None:
    def fn(x: Tensor) -> Tensor:
        mask = causal(x)
        x = sdpa(x, x, x, mask)
        mask[:, :2] = True
        return sdpa(x, x, x, mask)

    marked = marked_sdpa(fn, X)
    assert len(marked.sites) == 1
    assert "changed in place" in str(marked.refusals[0])
    assert "setitem" in {op_name(n) for n in marked.gm.graph.nodes}
    longer = torch.randn(1, 4, TOKENS + 5, 8)
    torch.testing.assert_close(run(marked, {"x": longer})[0], fn(longer))


def test_what_is_not_understood_is_refused_by_source_line_and_left() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))

    def alibi(x: Tensor) -> Tensor:
        i = torch.arange(x.shape[2])
        return torch.where(causal(x), (i[None] - i[:, None]) * 0.5, float("-inf"))

    def blocks(x: Tensor) -> Tensor:
        i = torch.arange(x.shape[2]) // 4
        return i[:, None] == i

    assert "dropout_p is 0.1" in refusals(lambda x: sdpa(x, x, x, dropout_p=0.1), X)
    assert "adds a bias" in refusals(lambda x: sdpa(x, x, x, alibi(x)), X)
    assert "none of causal" in refusals(lambda x: sdpa(x, x, x, blocks(x)), X)
    assert "none of causal" in refusals(lambda x: sdpa(x, x, x, causal(x) | (torch.arange(x.shape[2]) < 3)), X)
    assert "weight" in refusals(lambda x, w: sdpa(x, x, x, w[: x.shape[2], : x.shape[2]]), X, weight)
    assert "not one for each" in refusals(lambda x, k: sdpa(x, k, k), X, torch.randn(1, 4, 9, 8))
    assert "batch dim of queries, keys and values is 3, 3, 3" in refusals(
        lambda x: sdpa(x, x, x), X.expand(3, -1, -1, -1)
    )
    assert "batch dim" in refusals(lambda x: sdpa(x, x, x), torch.randn(TOKENS, 2, 4, 8))
    assert "mask has dims of its own" in refusals(lambda x: sdpa(x, x, x, causal(x).expand(3, 1, -1, -1)), X)
    source = refusals(lambda x: sdpa(x, x, x, dropout_p=0.1), X)
    assert "test_mark_attention.py" in source
    assert "dropout_p=0.1" in source


def test_sites_that_tell_requests_apart_differently_are_refused() -> None:
    def fn(q: Tensor, positions: Tensor) -> Tensor:
        request = (torch.diff(positions[0], prepend=positions[0, :1] - 1) != 1).cumsum(0)
        x = sdpa(q, q, q, causal(q) & (request[:, None] == request))
        return sdpa(x, x, x, is_causal=True)

    marked = marked_sdpa(fn, X, torch.arange(TOKENS)[None])
    assert (len(marked.sites), marked.requests, marked.positions) == (1, "positions", "l_positions_")
    assert "told apart by nothing (all tokens are one), but by restarts of l_positions_" in str(marked.refusals[0])


# -- calls that are the op already ------------------------------------------------------------------------------------


def test_the_op_itself_is_numbered_and_read() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = nn.Parameter(torch.randn(4))

        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            x = ops.attention(q, k, k[..., :6], self.sinks, None, 0.5, 3, 0, 30.0, -1)
            return x.sum(-1, keepdim=True) + ops.attention(q, q, q, None, None, 0.25, -1, -1, 0.0, -1)

    gm, token = trace(Body(), torch.randn(TOKENS, 4, 8), torch.randn(TOKENS, 2, 8))
    marked = mark_attention(gm, token)
    assert (marked.requests, marked.positions, marked.refusals) == ("batch", None, ())
    first, second = marked.sites
    assert (first.heads, first.kv_heads, first.head_size, first.value_head_size) == (4, 2, 8, 6)
    assert (first.scale, first.left, first.right, first.softcap, first.sinks) == (0.5, 3, 0, 30.0, True)
    assert (second.scale, second.mask, second.softcap, second.sinks) == (0.25, "two-sided", 0.0, False)
    assert [n.args[-1] for n in marked.gm.graph.nodes if n.target is ops.attention] == [0, 1]
    assert [n.args[-1] for n in gm.graph.nodes if n.target is ops.attention] == [-1, -1]
