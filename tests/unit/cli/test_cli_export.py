"""`halfstep export`: the folder it writes loads with transformers; what it cannot do is one sentence with a remedy."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from halfstep import Accelerator, Trainer, TrainingArguments
from halfstep.cli.main import main
from halfstep.demo import GPT, GPTConfig
from halfstep.optim import full_values
from halfstep.policy import DTYPES

TOKENS = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WIDE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
MODELS = {
    "gpt2": (AutoModelForCausalLM, lambda: GPT2LMHeadModel(GPT2Config(**TOKENS, n_positions=16, n_embd=16, n_layer=1, n_head=2))),
    "llama": (AutoModelForCausalLM, lambda: LlamaForCausalLM(LlamaConfig(**TOKENS, **WIDE, num_key_value_heads=1))),
    "bert": (AutoModelForSequenceClassification, lambda: BertForSequenceClassification(BertConfig(**{**TOKENS, **WIDE}, num_labels=3))),
}


def trained(place: Path, name: str, precision: str, loaded: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    accelerator, model = Accelerator(precision=precision, cpu=True), MODELS[name][1]().to(loaded)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    ids = torch.randint(1, 32, (4, 8))
    for _ in range(3):
        accelerator.backward(model(input_ids=ids, labels=ids[:, 0] % 3 if name == "bert" else ids).loss)
        assert optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(place)
    return model


@pytest.mark.parametrize(
    ("name", "precision", "loaded", "dtype"),
    [
        *(("gpt2", "bf16-lean", torch.float32, d) for d in DTYPES),
        *(("llama", "bf16-lean", torch.bfloat16, d) for d in ("fp32", "bf16")),
        ("llama", "bf16-true", torch.float32, "bf16"),
        ("bert", "fp16-lean", torch.float32, "fp16"),
        ("bert", "bf16-mixed", torch.bfloat16, "fp32"),
        ("gpt2", "fp16-true", torch.float32, "fp32"),
    ],
)
def test_from_pretrained_loads_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str, precision: str, loaded: torch.dtype, dtype: str
) -> None:
    model = trained(tmp_path / "state", name, precision, loaded)
    assert main(["export", str(tmp_path / "state"), "--dtype", dtype, "--output", str(tmp_path / "out")]) == 0
    assert f"wrote {tmp_path / 'out'} in {dtype}" in capsys.readouterr().out
    fresh = MODELS[name][0].from_pretrained(tmp_path / "out")
    assert type(fresh) is type(model)
    assert fresh.dtype == DTYPES[dtype]
    theirs = dict(fresh.named_parameters())
    assert list(theirs) == [n for n, _ in model.named_parameters()]
    for key, p in model.named_parameters():
        assert theirs[key].dtype == DTYPES[dtype]
        assert torch.equal(theirs[key], full_values(p).to(DTYPES[dtype])), key
    if name == "gpt2":
        assert fresh.lm_head.weight is fresh.transformer.wte.weight
        assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_the_checkpoint_of_a_trainer_is_exported_and_a_plain_module_gets_no_configuration(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rows = GPT(GPTConfig(block_size=8, layers=1, heads=1, width=8)), [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    args = TrainingArguments(str(tmp_path / "run"), precision="bf16-lean", max_steps=2, save_steps=2, use_cpu=True, disable_tqdm=True)
    Trainer(model, args, train_dataset=rows).train()
    assert main(["export", str(tmp_path / "run" / "checkpoint-2"), "--output", str(tmp_path / "out")]) == 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    fresh = GPT(GPTConfig(block_size=8, layers=1, heads=1, width=8))
    load_model(fresh, tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(a, full_values(b)) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nowhere", "--output", "out"], 1, ["CheckpointError", "does not exist"]),
        (["state", "--output", "state"], 2, ["ConfigError", "Name a new folder"]),
        (["state", "--output", "file"], 2, ["ConfigError", "is a file", "Name a new folder"]),
        (["state", "--output", "out", "--dtype", "fp16"], 2, ["ConfigError", "table.weight", "Use --dtype bf16 or fp32"]),
        (["damaged", "--output", "out"], 1, ["CheckpointError", "is damaged"]),
        (["foreign", "--output", "out"], 1, ["CheckpointError", "not a halfstep checkpoint"]),
    ],
)
def test_what_cannot_be_done_is_one_sentence_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, arguments: list[str], status: int, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    net = torch.nn.ModuleDict({"table": torch.nn.Embedding(3, 2)})
    torch.nn.init.constant_(net["table"].weight, 1e6)
    for name in ("state", "damaged"):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(net)
        accelerator.save_state(name)
    data = bytearray(Path("damaged/model.safetensors").read_bytes())
    data[-1] ^= 1
    Path("damaged/model.safetensors").write_bytes(bytes(data))
    Path("foreign").mkdir()
    Path("foreign/manifest.json").write_text('{"format": "other"}')
    Path("file").write_text("mine")
    assert main(["export", *arguments]) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("halfstep: ")
    assert all(word in said.err for word in words)
    assert not Path("out").exists()
    assert Path("file").read_text() == "mine"


@pytest.mark.parametrize("arguments", [["state"], [], ["state", "--output", "out", "--dtype", "fp8"], ["state", "--output", "out", "--what", "x"]])
def test_wrong_usage_has_status_2_and_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list[str]) -> None:
    try:
        status = main(["export", *arguments])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert any(word in said for word in ("--output", "checkpoint", "fp8", "--what"))


def test_help_names_the_formats(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["export", "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("--dtype", "fp32", "bf16", "fp16", "--output"))
