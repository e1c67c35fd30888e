"""Model loading from flags: weights, configuration, tokenizer, and dtype."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models import load
from megatron_ext.models.huggingface.export import save_hf_checkpoint
from megatron_ext.models.load import load_model, save_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from megatron_ext.text.tokenizer import NullTokenizer, TextTokenizer
from megatron_ext.text.vocabulary import Vocabulary
from tests.unit_tests.models.huggingface import oracles as oracle

CPU = torch.device("cpu")
TOKENS = oracle.prompt(40, seed=0, vocab_size=50)


def write_tokenizer(directory: Path, size: int, end: str = "w3") -> Path:
    """A tokenizer of `size` words "w0", "w1", ..."""
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return directory / "tokenizer.json"


@pytest.fixture
def saved(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> Path:
    """A checkpoint without a tokenizer."""
    save_dist_checkpoint(tmp_path / "saved", tiny_model, tiny_config)
    return tmp_path / "saved"


@pytest.fixture(autouse=True)
def embedded(
    tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path_factory: pytest.TempPathFactory, monkeypatch
) -> Path:
    """A stand-in for the embedded model, with a tokenizer of 50 words."""
    source = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), 50).parent
    directory = tmp_path_factory.mktemp("embedded")
    save_hf_checkpoint(directory, tiny_model, tiny_config, source)
    monkeypatch.setattr(load, "EMBEDDED_MODEL_DIR", directory)
    monkeypatch.setattr(load, "EMBEDDED_CONFIG", tiny_config)
    return directory


def logits(model: nn.Module) -> torch.Tensor:
    return oracle.our_logits(model, TOKENS).float()


def test_without_any_flag_the_embedded_model(tiny_model: nn.Module, tiny_config: ModelConfig) -> None:
    loaded = load_model(SourceConfig(), {}, device=CPU)
    assert (loaded.config.resolved(), loaded.dtype) == (tiny_config.resolved(), torch.float32)
    assert torch.equal(logits(loaded.model), logits(tiny_model))
    assert not loaded.model.training
    assert loaded.name == "embedded"
    assert loaded.tokenizer.tokenize("w5 w7") == [5, 7]
    assert loaded.tokenizer.eod == 3


def test_harmless_settings_keep_the_embedded_weights(tiny_model: nn.Module) -> None:
    loaded = load_model(SourceConfig(), {"max_position_embeddings": 32}, device=CPU)
    assert loaded.config.max_position_embeddings == 32
    assert torch.equal(logits(loaded.model), logits(tiny_model))


EQUAL = {  # what the model of this module is, by the names of its flags
    "hybrid_override_pattern": "M*-",
    "num_layers": 3,
    "hidden_size": 32,
    "ffn_hidden_size": 128,
    "kv_channels": 8,
    "num_query_groups": 2,
    "group_query_attention": True,
    "mamba_num_heads": 8,
    "squared_relu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
    "vocab_size": 50,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize("overrides", [EQUAL, *({name: value} for name, value in EQUAL.items())], ids=str)
def test_equal_values_keep_the_embedded_weights(
    overrides: dict, tiny_model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """Overrides equal to the configuration keep the weights, even if None there and derived from other fields."""
    loaded = load_model(SourceConfig(), overrides, device=CPU)
    assert torch.equal(logits(loaded.model), logits(tiny_model))
    assert loaded.name == "embedded"
    assert "random" not in caplog.text


@pytest.mark.parametrize(
    ("overrides", "flags"),
    [
        ({"squared_relu": False}, "--no-squared-relu (not --squared-relu) describes"),
        ({"qk_layernorm": True}, "--qk-layernorm (not --no-qk-layernorm) describes"),
        ({"disable_bias_linear": False}, "--no-disable-bias-linear (not --disable-bias-linear) describes"),
        ({"num_query_groups": 4, "max_position_embeddings": 32}, "--num-query-groups 4 (not 2) describes"),
        (
            {"ffn_hidden_size": 64, "kv_channels": 16},
            "--ffn-hidden-size 64 (not 128), --kv-channels 16 (not 8) describe",
        ),
        ({"hybrid_override_pattern": "-" * 100}, f"--hybrid-override-pattern {'-' * 60}... (not M*-) describes"),
    ],
    ids=str,
)
def test_other_values_are_named_and_the_weights_are_random(
    overrides: dict, flags: str, tiny_model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_model(SourceConfig(), overrides | {"vocab_size": 50}, device=CPU)
    assert not torch.allclose(logits(loaded.model), logits(tiny_model))
    assert loaded.name.startswith("random weights")
    (message,) = (record.getMessage() for record in caplog.records if record.name == load.logger.name)
    assert message == f"{flags} a model other than the embedded one: its weights are random"


def test_random_weights_for_an_architecture() -> None:
    """Seeded; text goes through the embedded model's tokenizer, whose size is the vocabulary's."""
    small = {"hybrid_override_pattern": "*-", "hidden_size": 16}
    first, again, other = (load_model(SourceConfig(seed=seed), small, device=CPU) for seed in (1, 1, 2))
    assert (first.config.vocab_size, first.tokenizer.vocab_size) == (50, 50)
    assert isinstance(first.tokenizer, TextTokenizer)
    assert first.name == "random weights, *-"
    assert torch.equal(logits(first.model), logits(again.model))
    assert not torch.allclose(logits(first.model), logits(other.model))


def test_random_weights_for_a_tokenizer_or_a_vocabulary_size(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path, 33)
    loaded = load_model(SourceConfig(tokenizer_model=str(file)), {"hybrid_override_pattern": "M"}, device=CPU)
    assert (loaded.config.vocab_size, loaded.tokenizer.vocab_size) == (33, 33)
    padded = load_model(SourceConfig(tokenizer_model=str(file)), {"vocab_size": 64}, device=CPU)
    assert (padded.config.vocab_size, padded.tokenizer.vocab_size) == (64, 33)
    sized = load_model(SourceConfig(), {"vocab_size": 60}, device=CPU)
    assert isinstance(sized.tokenizer, NullTokenizer)
    assert (sized.tokenizer.vocab_size, sized.config.vocab_size) == (60, 60)
    with pytest.raises(ConfigError, match="NullTokenizer needs --vocab-size"):
        load_model(SourceConfig(tokenizer_type="NullTokenizer"), {"hybrid_override_pattern": "*"}, device=CPU)


def test_checkpoint_without_tokenizer_takes_ids(saved: Path, tiny_model: nn.Module, tmp_path: Path) -> None:
    loaded = load_model(SourceConfig(load=str(saved)), {}, device=CPU)
    assert torch.equal(logits(loaded.model), logits(tiny_model))
    assert loaded.name == str(saved)
    assert isinstance(loaded.tokenizer, NullTokenizer)
    assert loaded.tokenizer.vocab_size == 50
    save_model(tmp_path / "again", loaded)
    assert isinstance(load_model(SourceConfig(load=str(tmp_path / "again")), {}, device=CPU).tokenizer, NullTokenizer)


def test_overrides_win_where_they_are_allowed(saved: Path, tiny_model: nn.Module) -> None:
    """Squared ReLU and GELU use equal tensors, so the flag decides."""
    source = SourceConfig(load=str(saved), override_checkpoint_args=("squared-relu", "norm-epsilon"))
    loaded = load_model(source, {"squared_relu": False, "norm_epsilon": 1e-3}, device=CPU)
    assert (loaded.config.squared_relu, loaded.config.norm_epsilon) == (False, 1e-3)
    assert not torch.allclose(logits(loaded.model), logits(tiny_model))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"hybrid_override_pattern": "MM-"},
            "--hybrid-override-pattern MM- .not M[*]-. contradicts .*, or load another checkpoint",
        ),
        ({"num_attention_heads": 2}, "--num-attention-heads 2 .not 4.*contradict"),
        ({"mamba_state_dim": 2, "mamba_num_groups": 8}, "--mamba-state-dim 2 .not 16.*contradict"),
        ({"recurrent_layer": "mamba1"}, "--recurrent-layer mamba1 .not mamba2.*contradict"),
        ({"vocab_size": 64}, "--vocab-size 64 contradicts .* for 50"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_overrides_that_contradict_the_weights(overrides: dict, message: str, saved: Path) -> None:
    """Contradictions are found even if all shapes agree: other head sizes, groups and states exchanged."""
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(SourceConfig(load=str(saved)), overrides, device=CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"untie_embeddings_and_output_weights": True}, "lacks output_layer.weight"),
        ({"normalization": "LayerNorm"}, "lacks decoder.final_norm.bias"),
        ({"disable_bias_linear": False}, "lacks decoder.layers.1.self_attention.linear_proj.bias"),
        (
            {"swiglu": True, "squared_relu": False},
            r"linear_fc1.weight has shape \(128, 32\), and the configuration requires \(256, 32\)",
        ),
        ({"position_embedding_type": "learned_absolute"}, "lacks embedding.position_embeddings.weight"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_overrides_that_ask_for_other_tensors(overrides: dict, message: str, saved: Path) -> None:
    allowed = tuple(name.replace("_", "-") for name in overrides)
    with pytest.raises(CheckpointError, match=message):
        load_model(SourceConfig(load=str(saved), override_checkpoint_args=allowed), overrides, device=CPU)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hiden_size": 64}, "unknown model field hiden_size"),
        ({"hidden_size": "64"}, "hidden_size = '64'; it must be of type int"),
        ({"hybrid_override_pattern": "MX"}, "unknown letter"),
    ],
    ids=str,
)
def test_settings_that_are_none(overrides: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(SourceConfig(), overrides, device=CPU)


def test_directories_that_are_not_there(saved: Path, tmp_path: Path) -> None:
    for flag, source in (
        ("--load", SourceConfig(load=str(tmp_path / "nowhere"))),
        ("--load-hf", SourceConfig(load_hf=str(tmp_path / "nowhere"))),
    ):
        with pytest.raises(ConfigError, match=f"{flag} .*nowhere does not exist"):
            load_model(source, {}, device=CPU)
    with pytest.raises(ConfigError, match=r"--load .*config\.json is not a directory"):
        load_model(SourceConfig(load=str(saved / "config.json")), {}, device=CPU)


def test_the_other_kind_of_checkpoint(saved: Path, hf_copy: Path) -> None:
    with pytest.raises(ConfigError, match="try --load-hf"):
        load_model(SourceConfig(load=str(hf_copy)), {}, device=CPU)
    with pytest.raises(ConfigError, match="give --load"):
        load_model(SourceConfig(load_hf=str(saved)), {}, device=CPU)


def test_tokenizer_larger_than_the_model(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model's ids are usable, the others are refused in prompts."""
    file = write_tokenizer(tmp_path, 51)
    loaded = load_model(SourceConfig(load=str(saved), tokenizer_model=str(file)), {}, device=CPU)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.fullmatch(r"the tokenizer has 51 ids, the model in .* has 50; prompts .* are refused", line)
    vocabulary = Vocabulary(loaded.tokenizer, 50)
    assert vocabulary.has_tokens(loaded.tokenizer.tokenize("w1 w49"))
    with pytest.raises(ConfigError, match="token id 50 is not in the vocabulary of 50"):
        vocabulary.check_prompt(loaded.tokenizer.tokenize("w50"))
    with pytest.raises(ConfigError, match="the tokenizer has 51 ids, --vocab-size is 40"):
        load_model(SourceConfig(tokenizer_model=str(file)), {"vocab_size": 40}, device=CPU)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ({"bf16": True}, torch.bfloat16),
        ({"fp16": True}, torch.float16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "float32"}, torch.float32),
    ],
    ids=str,
)
def test_sixteen_bits(flags: dict, dtype: torch.dtype, tiny_model: nn.Module) -> None:
    loaded = load_model(SourceConfig(**flags), {}, device=CPU)
    assert loaded.dtype is dtype
    assert loaded.model.get_parameter("decoder.layers.0.mixer.in_proj.weight").dtype is dtype
    assert (logits(loaded.model) - logits(tiny_model)).abs().max() < 0.1


def test_type_by_device_without_a_flag() -> None:
    assert load._dtype(SourceConfig(), torch.device("cuda")) is torch.bfloat16
    assert load._dtype(SourceConfig(), CPU) is torch.float32


def test_imported_checkpoint_saved_and_loaded(hf_copy: Path, tmp_path: Path) -> None:
    """--load-hf, --save, --load: the same logits, and the same ends of a document."""
    write_tokenizer(hf_copy, 101)
    (hf_copy / "tokenizer_config.json").write_text("{}")
    (hf_copy / "generation_config.json").write_text('{"eos_token_id": [9, 2]}')
    imported = load_model(SourceConfig(load_hf=str(hf_copy)), {}, device=CPU)
    assert (imported.tokenizer.eod, imported.tokenizer.ends) == (9, (9, 2))
    save_model(tmp_path / "own", imported)
    loaded = load_model(SourceConfig(load=str(tmp_path / "own")), {}, device=CPU)
    assert loaded.config == imported.config
    assert torch.equal(logits(loaded.model), logits(imported.model))
    assert (loaded.tokenizer.eod, loaded.tokenizer.ends) == (9, (9, 2))
    assert loaded.tokenizer.tokenize("w5 w100") == [5, 100]


def test_save_directory_is_checked_before_loading(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"--save .* is not overwritten, it holds notes\.txt"):
        load_model(SourceConfig(load=str(tmp_path / "nowhere"), save=str(tmp_path)), {}, device=CPU)
    load_model(SourceConfig(save=str(tmp_path / "new")), {}, device=CPU)
    assert not (tmp_path / "new").exists(), "loading saves nothing"
