"""Causal language models of transformers without logits: the same loss and gradients, whatever their heads do, and a reason where that cannot be."""

import copy
import inspect
import threading
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from halfstep import Accelerator, amp
from halfstep.amp import chunks
from halfstep.errors import ConfigError
from halfstep.policy import parse

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHead",
        {"vocab_size": 97, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    ),
    "llama": ("LlamaForCausalLM", SIZES),
    "qwen2, tied": ("Qwen2ForCausalLM", SIZES | {"tie_word_embeddings": True}),
    "gemma2, capped": ("Gemma2ForCausalLM", SIZES | {"head_dim": 16, "final_logit_softcapping": 0.1}),
    "cohere, scaled": ("CohereForCausalLM", SIZES),
    "granite, divided": ("GraniteForCausalLM", SIZES | {"logits_scaling": 3.0}),
    "mixtral, with a loss of its router": ("MixtralForCausalLM", SIZES | {"num_local_experts": 4, "output_router_logits": True}),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, settings = KNOWN[name]
    config = getattr(transformers, kind.split("For")[0].removesuffix("LMHead") + "Config")(**settings)
    model: nn.Module = getattr(transformers, kind if "For" in kind else kind + "Model")(config).train()
    with torch.no_grad():  # logits of some size, so that a cap or a scale that is lost is seen
        model.get_output_embeddings().weight.mul_(20)
    return model


IDS = torch.randint(0, 97, (3, 11), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(torch.arange(11) % 4 == 1, -100, IDS)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 1)
    monkeypatch.setattr(chunks, "FEWEST", 7)


def step(model: nn.Module, **inputs: Any) -> tuple[Any, list[Tensor]]:
    model.zero_grad()
    outputs = model(input_ids=IDS, labels=LABELS, **inputs)
    outputs.loss.backward()
    return outputs, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", KNOWN)
def test_loss_and_gradients_are_those_with_logits(name: str) -> None:
    model = made(name)
    expected = [step(model), step(model, num_items_in_batch=40)]
    handle = amp.chunk_loss(model)
    for (whole, gradients), (outputs, found) in zip(expected, [step(model), step(model, num_items_in_batch=40)], strict=True):
        assert outputs.logits is None
        assert type(outputs) is type(whole)
        torch.testing.assert_close(outputs.loss, whole.loss, rtol=1e-6, atol=0)
        for ours, theirs in zip(found, gradients, strict=True):
            assert float((ours - theirs).abs().max()) <= 2e-5 * float(theirs.abs().max())
    assert any(value is None for value in model(input_ids=IDS, labels=LABELS, return_dict=False))
    handle.remove()
    again, _ = step(model)
    assert torch.equal(again.logits, expected[0][0].logits)
    assert "forward" not in model.__dict__
    assert "forward" not in model.get_output_embeddings().__dict__


def test_logits_are_there_where_they_are_asked_for() -> None:
    model = made("llama")
    expected, _ = step(model)
    handle = amp.chunk_loss(model)
    with handle.whole():
        outputs, _ = step(model)
        assert torch.equal(outputs.logits, expected.logits)
    assert model(input_ids=IDS).logits is not None
    model.eval()
    assert torch.equal(model(input_ids=IDS, labels=LABELS).logits, expected.logits)
    handle.remove()
    handle.remove()
    handle = amp.chunk_loss(model, evaluation=True)
    assert model(input_ids=IDS, labels=LABELS).logits is None
    assert model.generate(IDS[:1], max_new_tokens=2, do_sample=False).shape == (1, 13)


def test_labels_by_place_and_other_threads() -> None:
    model = made("llama")
    amp.chunk_loss(model)
    place = list(inspect.signature(type(model).forward).parameters).index("labels") - 1
    arguments: list[Any] = [IDS, *[None] * (place - 1), LABELS]
    assert model(*arguments).logits is None
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(model(input_ids=IDS, labels=LABELS).logits))
    thread.start()
    thread.join()
    assert seen == [None]


def test_smoothed_labels() -> None:
    model = made("llama")
    logits = model(input_ids=IDS).logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, LABELS[:, 1:].flatten(), label_smoothing=0.2)
    amp.chunk_loss(model, label_smoothing=0.2)
    torch.testing.assert_close(model(input_ids=IDS, labels=LABELS).loss, expected)


@pytest.mark.parametrize("text", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-lean", "fp16-lean", "bf16-true", "bf16-lean,fp32=lm_head"])
@pytest.mark.parametrize("name", ["llama", "qwen2, tied"])
def test_a_bound_model_keeps_the_same_weights_and_its_loss(name: str, text: str) -> None:
    if "fp32=" in text and "tied" in name:
        text = "bf16-mixed,fp32=lm_head"
    found = []
    for chunked in (False, True):
        model = made(name)
        if chunked:
            amp.chunk_loss(model)
        amp.bind(model, parse(text), CPU)
        outputs, gradients = step(model)
        found.append([outputs.loss.detach(), *gradients])
        assert (outputs.logits is None) == chunked
    bound = 1e-5 if text == "fp32" else 16 * torch.finfo(parse(text).dtype).eps
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert ours.dtype == theirs.dtype
        assert float((ours - theirs).abs().max()) <= bound * float(theirs.abs().max())


def test_a_head_that_is_held_or_pinned_in_fp32_is_multiplied_in_fp32() -> None:
    """The hidden states of two equal models are the same 16-bit numbers; the loss is that of an fp32 head exactly."""
    losses = []
    for how in ("held", "pinned", "16 bits"):
        model = made("llama")
        amp.chunk_loss(model)
        amp.bind(model, parse("bf16-mixed,fp32=lm_head" if how == "held" else "bf16-mixed"), CPU)
        if how == "pinned":
            amp.pin(model, "lm_head")
        losses.append(model(input_ids=IDS, labels=LABELS).loss.detach())
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


def test_the_accelerator_scales_and_steps() -> None:
    weights = []
    for chunked in (False, True):
        model = made("gpt2")
        if chunked:
            amp.chunk_loss(model)
        accelerator = Accelerator(precision="fp16-mixed", cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            accelerator.backward(model(input_ids=IDS, labels=LABELS).loss)
            optimizer.step()
            assert accelerator.last_step.applied
            optimizer.zero_grad()
        weights.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)


def test_a_copy_has_a_chunked_loss_of_its_own() -> None:
    model = made("llama")
    amp.chunk_loss(model)
    twin = copy.deepcopy(model)
    assert twin(input_ids=IDS, labels=LABELS).logits is None
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    even = torch.tensor(97.0).log()
    torch.testing.assert_close(twin(input_ids=IDS, labels=LABELS).loss, even)
    assert abs(model(input_ids=IDS, labels=LABELS).loss.detach() - even) > 0.01


def test_the_check_leaves_no_trace() -> None:
    model = made("llama")
    before, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    model.model.layers[0].eval()
    amp.chunk_loss(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert [part.training for part in model.model.layers] == [False, True]
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2, capped"])
@pytest.mark.parametrize("text", ["fp16-mixed", "bf16-lean", "fp32"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself, when it compiles
def test_compiled_it_is_one_graph_with_the_same_bits(name: str, text: str) -> None:
    found = []
    for compiled in (False, True):
        model = made(name)
        amp.chunk_loss(model)
        amp.bind(model, parse(text), CPU)
        with torch.no_grad():
            model(input_ids=IDS, labels=LABELS)
        torch._dynamo.reset()
        call: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        outputs = call(input_ids=IDS, labels=LABELS)
        assert outputs.logits is None
        outputs.loss.backward()
        found.append([outputs.loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Odd(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """A llama that does something else with its logits."""

    does: Any = staticmethod(lambda logits: logits)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.does(self.lm_head(hidden))
        return {"loss": self.loss_function(logits=logits, labels=labels, vocab_size=97), "logits": logits}


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (lambda z: z + 1, "unsupported operand"),
        (lambda z: z * torch.ones(97), "multiplies them by a Tensor"),
        (lambda z: z / torch.ones(()), "divides them by a Tensor"),
        (lambda z: z.tanh().tanh(), "tanh twice"),
        (lambda z: torch.softmax(z, -1), "gives them to softmax"),
        (lambda z: z[:, :], "not subscriptable"),
        (lambda z: z.masked_fill(z > 0, 0.0), "have no 'masked_fill'|not supported"),
        (lambda z: -1 * z.tanh(), "softcap=-1"),
    ],
)
def test_a_model_that_uses_its_logits_otherwise_is_refused(does: Any, message: str) -> None:
    model = Odd(transformers.LlamaConfig(**SIZES))
    model.does = does
    with pytest.raises(ConfigError, match=message):
        amp.chunk_loss(model)
    assert "forward" not in model.__dict__
    assert model(IDS, LABELS)["logits"] is not None


def test_a_loss_that_is_another_one_is_found_by_its_value() -> None:
    class Twice(Odd):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
            outputs = super().forward(input_ids, labels)
            return outputs | {"loss": outputs["loss"] * (2 if isinstance(outputs["logits"], Tensor) else 1)}

    with pytest.raises(ConfigError, match=r"is .* with its logits and .* without"):
        amp.chunk_loss(Twice(transformers.LlamaConfig(**SIZES)))


def test_models_that_are_not_known_are_refused_with_the_reason() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 97}
    with pytest.raises(ConfigError, match="ForMaskedLMLoss and not ForCausalLMLoss"):
        amp.chunk_loss(transformers.BertForMaskedLM(transformers.BertConfig(**small)))
    with pytest.raises(ConfigError, match="does not tell its head"):
        amp.chunk_loss(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="given a str"):
        amp.chunk_loss("gpt2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes no labels"):
        amp.chunk_loss(transformers.LlamaModel(transformers.LlamaConfig(**SIZES)))
    t5 = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16, "vocab_size": 97, "decoder_start_token_id": 0}
    with pytest.raises(ConfigError, match="without logits"):
        amp.chunk_loss(transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)))


def test_what_is_done_in_the_wrong_order_is_refused() -> None:
    model = made("llama")
    handle = amp.chunk_loss(model)
    with pytest.raises(ConfigError, match="already"):
        amp.chunk_loss(model)
    binding = amp.bind(model, parse("bf16-mixed"), CPU)
    with pytest.raises(ConfigError, match="bound to bf16-mixed later"):
        handle.remove()
    binding.remove()
    assert model(input_ids=IDS, labels=LABELS).logits is None
    handle.remove()
    amp.bind(model, parse("bf16-mixed"), CPU)
    with pytest.raises(ConfigError, match="bound to a policy already"):
        amp.chunk_loss(model)
    model = made("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ConfigError, match="the head of LlamaForCausalLM is a Sequential"):
        amp.chunk_loss(model)
    model = made("llama")
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="hooks"):
        amp.chunk_loss(model)
    model = made("llama")
    model.loss_function = lambda **_: torch.zeros(())
    with pytest.raises(ConfigError, match="<lambda>"):
        amp.chunk_loss(model)
