"""`python -m mmjax.export` writes what transformers and PEFT load, and then they compute what the run computes."""

from __future__ import annotations

import filecmp
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import llava_folder
import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers
from commands import TINY, run
from fine_tuning import LORA, fine_tune, moved, moved_run, save_checkpoint, tuning
from safetensors.numpy import load_file
from safetensors.torch import save_file

from mmjax import export
from mmjax.batch import PADDING, Microbatch, TextBatch
from mmjax.config import ConnectorConfig, LoraConfig, MeshConfig, VisionConfig
from mmjax.config.loading import load
from mmjax.disk import verify_checksum, with_checksum
from mmjax.hf.families import from_hf
from mmjax.hf.folder import HfFolder
from mmjax.models.model import Model
from mmjax.models.quantization import dequantize, quantize
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime import trained_weights
from mmjax.runtime.checkpoint_metadata import checkpoint_step
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.saved_parameters import SavedParameters, restore_parameters
from mmjax.runtime.state import parameter_shardings

BF16 = torch.bfloat16
TOKENS = np.random.default_rng(0).integers(1, 40, (2, 24)).astype(np.int32)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Qwen2 in several files, float32."""
    folder = tmp_path_factory.mktemp("source")
    save_checkpoint(folder, shard="20KB")
    return folder


@pytest.fixture(scope="module")
def tuned(source, tmp_path_factory) -> Path:
    """A run with adapters on that."""
    return fine_tune(source, tmp_path_factory.mktemp("runs") / "lora", lora=LORA)


def ours(folder: Path) -> np.ndarray:
    """The logits of a run's newest checkpoint, float32."""
    run = RunFolder(folder)
    model = Model.build(run.read_config().model, jnp.float32)
    shardings = parameter_shardings(
        model, make_mesh(MeshConfig(), jax.devices()[:1]), ShardingRules()
    )
    params = restore_parameters(run.checkpoints, checkpoint_step(run.checkpoints), model, shardings)
    full = lambda value: np.full(TOKENS.shape, value, np.int32)  # noqa: E731
    at = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape)
    fields = dict.fromkeys(TextBatch._fields, full(0)) | {"slots": {}, "send": {}, "token": TOKENS}
    fields |= {
        "pos": at,
        "position": at,
        "offset": at,
        "kind": full(1),
        "sees": full(1),
        "owner": full(PADDING),
    }
    return np.asarray(jax.jit(model.logits)(params, Microbatch(TextBatch(**fields), {})))


def theirs(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model.to(torch.float32).eval()(input_ids=torch.tensor(TOKENS).long()).logits.numpy()


def loaded(folder: Path, **options) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **options
    )


def check_beside(source: Path, out: Path) -> None:
    """Everything but the values is the source's: files to the byte; names, places, shapes and types of tensors."""
    names = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()}
    assert {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} == names
    for name in names:
        if not name.endswith(".safetensors"):
            assert filecmp.cmp(source / name, out / name, shallow=False), name
    before, after = HfFolder.open(source).tensors, HfFolder.open(out).tensors
    assert {k: replace(s, file=s.file.name) for k, s in before.items()} == {
        k: replace(s, file=s.file.name) for k, s in after.items()
    }


FAMILIES = {
    "llama": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2 tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 16}),
    "cohere2": (transformers.Cohere2Config, {"eos_token_id": 2, "num_hidden_layers": 5}),
    "exaone4": (transformers.Exaone4Config, {"num_hidden_layers": 5}),
    "hyperclovax": (transformers.HyperCLOVAXConfig, {"residual_multiplier": 0.4}),
    "gpt2": (transformers.GPT2Config, {"bos_token_id": 2, "eos_token_id": 2}),
    "opt": (transformers.OPTConfig, {"ffn_dim": 40, "pad_token_id": 0}),
    "qwen3_5_text": (
        transformers.Qwen3_5TextConfig,
        {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        }
        | {"num_hidden_layers": 4},
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 3}),
    "llama4_text": (
        transformers.Llama4TextConfig,
        {
            "head_dim": 16,
            "num_local_experts": 3,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 40,
        },
    ),
    "lfm2": (transformers.Lfm2Config, {"full_attn_idxs": [1], "conv_bias": True}),
    "gpt_oss": (
        transformers.GptOssConfig,
        {"head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            "head_dim": 16,
            "num_experts": 5,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
            "num_experts_per_tok": 2,
        },
    ),
}


@pytest.mark.default_cases("qwen2 tied", "gemma2", "qwen3_5_text", "mixtral")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_checkpoint_computes_in_transformers_what_the_run_computes(family, tmp_path):
    kind, own = FAMILIES[family]
    before = save_checkpoint(tmp_path / "source", kind, **own)
    run = moved(tmp_path / "source", tmp_path / "run")
    told = export.export(run, tmp_path / "out")
    assert f"{tmp_path / 'run'} after 3 steps" in told[0]
    check_beside(tmp_path / "source", tmp_path / "out")
    found, wanted = theirs(loaded(tmp_path / "out")), ours(run)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert np.abs(found - theirs(before)).max() > 0.01
    loaded(tmp_path / "out", torch_dtype="auto").save_pretrained(tmp_path / "again")
    after, again = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert after.keys() == again.keys()
    for key in again:
        np.testing.assert_array_equal(after[key], again[key])


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_what_was_not_trained_comes_back_to_the_byte(dtype, precision, tmp_path):
    save_checkpoint(tmp_path / "source", dtype=dtype, shard="20KB", tie_word_embeddings=True)
    still = {"precision": precision, "amount": 0.0}
    # whose b stays zero, over weights that are held in the computation's precision
    frozen = LoraConfig(("llm.*",), 2)
    for name, changes in {"whole": still, "adapters": still | {"lora": {"all": frozen}}}.items():
        export.export(
            moved(tmp_path / "source", tmp_path / name, **changes), tmp_path / f"{name} out"
        )
        check_beside(tmp_path / "source", tmp_path / f"{name} out")
        for path in (tmp_path / "source").glob("*.safetensors"):
            assert filecmp.cmp(path, tmp_path / f"{name} out" / path.name, shallow=False), path.name


@pytest.mark.exhaustive
def test_a_bfloat16_checkpoint_stays_one_and_a_frozen_module_unchanged(tmp_path):
    save_checkpoint(tmp_path / "source", dtype=BF16)
    run = moved(tmp_path / "source", tmp_path / "run", precision="bfloat16", lora=LORA)
    export.export(run, tmp_path / "out")
    check_beside(tmp_path / "source", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "out"))
    for key, value in before.items():
        adapted = ("self_attn" in key and key.endswith("proj.weight")) or "down_proj" in key
        assert (value.tobytes() != after[key].tobytes()) == adapted, key
    found = theirs(loaded(tmp_path / "out"))
    # merged weights are rounded
    np.testing.assert_allclose(found, ours(run), atol=0.02 * np.abs(found).max())


def test_adapters_are_merged_or_written_for_peft_and_both_compute_the_same(source, tuned, tmp_path):
    export.export(tuned, tmp_path / "merged")
    check_beside(source, tmp_path / "merged")
    wanted = ours(tuned)
    np.testing.assert_allclose(theirs(loaded(tmp_path / "merged")), wanted, atol=1e-4)
    told = export.export(tuned, tmp_path / "adapter", adapter=True)
    assert "15 linear layers" in told[1]
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    base = loaded(source)
    plain = theirs(base)
    beside = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    np.testing.assert_allclose(theirs(beside), wanted, atol=1e-4)
    assert np.abs(plain - wanted).max() > 0.01
    theirs_merged = beside.merge_and_unload()
    for key, value in theirs_merged.state_dict().items():
        mine = HfFolder.open(tmp_path / "merged").read(key)
        np.testing.assert_allclose(mine, value.numpy(), atol=1e-6, err_msg=key)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["nf4", "int8"])
def test_adapters_are_merged_into_the_quantised_weights_beside_which_they_were_trained(
    how, tmp_path
):
    source, merged = tmp_path / "source", tmp_path / "merged"
    save_checkpoint(source, hidden_size=64, intermediate_size=128)
    llm = replace(from_hf(source).llm, quantize=how)
    run = moved(source, tmp_path / "run", lora={"all": LoraConfig(("llm.layers.*",), 4)}, llm=llm)
    export.export(run, merged)
    check_beside(source, merged)
    np.testing.assert_allclose(theirs(loaded(merged)), ours(run), atol=1e-4)
    export.export(run, tmp_path / "adapter", adapter=True)
    base = loaded(source)
    for layer in base.model.layers:
        for linear in (module for module in layer.modules() if isinstance(module, torch.nn.Linear)):
            stored = quantize(jnp.asarray(linear.weight.detach().numpy().T), how)
            linear.weight.data = torch.tensor(np.asarray(dequantize(stored, jnp.float32)).T.copy())
    beside = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    np.testing.assert_allclose(theirs(beside), ours(run), atol=1e-4)


@pytest.mark.exhaustive
def test_quantised_weights_without_adapters_come_back_to_the_byte(tmp_path):
    save_checkpoint(tmp_path / "source")
    llm = replace(from_hf(tmp_path / "source").llm, quantize="int8")
    run = moved(
        tmp_path / "source", tmp_path / "run", lora={"some": LoraConfig(("*.down",), 4)}, llm=llm
    )
    export.export(run, tmp_path / "out")
    before, after = (HfFolder.open(tmp_path / name) for name in ("source", "out"))
    for key in before.tensors:
        assert (before.read(key).tobytes() != after.read(key).tobytes()) == ("down_proj" in key), (
            key
        )


def test_parameters_are_read_a_few_at_a_time(source, tuned, tmp_path, monkeypatch):
    export.export(tuned, tmp_path / "at once")
    read, held = SavedParameters.read, []

    def counted(self, names):
        found = read(self, names)
        held.append(sum(x.nbytes for path, x in found.items() if "lora" not in path))
        return found

    monkeypatch.setattr(trained_weights, "GROUP_BYTES", 12_000)
    monkeypatch.setattr(SavedParameters, "read", counted)
    export.export(tuned, tmp_path / "in turns")
    assert len(held) > 8
    assert max(held) <= 12_000
    assert sum(held) == sum(
        4 * np.prod(s.shape, dtype=int) for s in HfFolder.open(source).tensors.values()
    )
    for path in (tmp_path / "at once").glob("*.safetensors"):
        assert filecmp.cmp(path, tmp_path / "in turns" / path.name, shallow=False)


def test_a_damaged_checkpoint_is_not_exported(tuned, tmp_path, capsys):
    work = shutil.copytree(tuned, tmp_path / "run")
    meta = work / "checkpoints" / "3" / "meta" / "metadata"
    said = verify_checksum(json.loads(meta.read_text()))
    said["sums"]["trainable.llm.layers.2.mlp.down.lora.b"] += 1
    meta.write_text(json.dumps(with_checksum(said)))
    ended = run(capsys, export.main, work, tmp_path / "out")
    assert ended.code == 2
    assert "trainable.llm.layers.2.mlp.down.lora.b is not what was saved" in ended.err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.default_cases("dora")
@pytest.mark.parametrize("form", ["rank", "sqrt_rank", "dora"])
def test_peft_writes_the_same_adapter_folder(source, form, tmp_path):
    scaling, dora = ("rank", True) if form == "dora" else (form, False)
    layers, dropout = ("llm.*.query", "llm.*.up"), 0.0 if dora else 0.1
    lora = {"all": LoraConfig(layers, 4, 6.0, scaling, dora=dora, dropout=dropout)}
    run = moved(source, tmp_path / "run", lora=lora)
    export.export(run, tmp_path / "out", adapter=True)
    beside = peft.PeftModel.from_pretrained(loaded(source), tmp_path / "out")
    np.testing.assert_allclose(theirs(beside), ours(run), atol=1e-4)
    if dora:
        # Merged, the same weights too.
        export.export(run, tmp_path / "merged")
        merged = loaded(tmp_path / "merged").state_dict()
        for name, x in beside.merge_and_unload().state_dict().items():
            np.testing.assert_allclose(merged[name], x, rtol=0, atol=1e-6, err_msg=name)
        beside = peft.PeftModel.from_pretrained(loaded(source), tmp_path / "out")
    beside.save_pretrained(tmp_path / "again")
    mine, again = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "again")
    )
    assert mine.keys() == again.keys()
    for key in mine:
        np.testing.assert_array_equal(mine[key], again[key])
    mine, again = (
        json.loads((tmp_path / n / "adapter_config.json").read_text()) for n in ("out", "again")
    )
    assert (
        sorted(mine.pop("target_modules"))
        == sorted(again["target_modules"])
        == ["q_proj", "up_proj"]
    )
    assert mine.items() <= {**again, "task_type": mine["task_type"]}.items()


@pytest.mark.default_cases("llm")
@pytest.mark.parametrize(
    "patterns",
    [
        ("llm.*", "vision.*.query", "vision.connector.*"),
        ("llm.*.query", "vision.*"),
        ("*.value", "vision.connector.*"),
    ],
    ids=["llm", "vision", "values"],
)
def test_adapters_of_a_vision_language_model_compute_in_peft_what_the_merged_folder_computes(
    patterns, tmp_path
):
    llava_folder.save_checkpoint(tmp_path / "source")
    run = moved(tmp_path / "source", tmp_path / "run", lora={"all": LoraConfig(patterns, 4, 6.0)})
    export.export(run, tmp_path / "merged")
    export.export(run, tmp_path / "adapter", adapter=True)
    kind = transformers.LlavaForConditionalGeneration
    merged, source = (kind.from_pretrained(tmp_path / name).eval() for name in ("merged", "source"))
    image, text = merged.config.image_token_index, torch.arange(5, 25)
    given = {
        "input_ids": torch.cat([text, torch.full((16,), image), text])[None],
        "pixel_values": torch.randn(1, 3, 16, 16, generator=torch.manual_seed(0)),
    }
    with torch.no_grad():
        before, wanted = source(**given).logits, merged(**given).logits
        found = peft.PeftModel.from_pretrained(source, tmp_path / "adapter").eval()(**given).logits
    assert (before - wanted).abs().max() > 0.01
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["llava_lora", "bfloat16"])
def test_the_shipped_recipe_is_an_adapter_with_its_connector_saved_whole(recipe, tmp_path):
    """The model, tower and all, computes in PEFT what the merged folder computes; PEFT saves the same tensors again."""
    dtype = BF16 if recipe == "bfloat16" else torch.float32
    llava_folder.save_checkpoint(tmp_path / "source", dtype)
    words = [
        f"checkpoint={tmp_path / 'source'}",
        "data=none.json",
        "model.lora.llm.rank=4",
        "model.lora.llm.alpha=8",
    ]
    run = moved_run(
        load("llava_lora", [*words, f"run={tmp_path / 'run'}", "training.precision=float32"]), 0.05
    )
    export.export(run, tmp_path / "merged")
    told = export.export(run, tmp_path / "adapter", adapter=True)
    assert "vision.connector whole, as modules_to_save" in told[-1]
    kind = transformers.LlavaForConditionalGeneration
    merged, source, plain = (
        kind.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        for name in ("merged", "source", "source")
    )
    image, text = merged.config.image_token_index, torch.arange(5, 25)
    given = {
        "input_ids": torch.cat([text, torch.full((16,), image), text])[None],
        "pixel_values": torch.randn(1, 3, 16, 16, generator=torch.manual_seed(0)),
    }
    beside = peft.PeftModel.from_pretrained(source, tmp_path / "adapter").eval()
    with torch.no_grad():
        before, wanted, found = (model(**given).logits for model in (plain, merged, beside))
    assert (before - wanted).abs().max() > 0.01
    # merged weights are rounded
    near = 1e-4 if dtype == torch.float32 else 0.02 * wanted.abs().max().item()
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=near)
    beside.save_pretrained(tmp_path / "again")
    mine, again = (
        safetensors.torch.load_file(tmp_path / n / "adapter_model.safetensors")
        for n in ("adapter", "again")
    )
    assert mine.keys() == again.keys()
    assert sum("projector" in key for key in mine) == 4
    for key in mine:
        assert torch.equal(mine[key].to(torch.float32), again[key].to(torch.float32)), key


def test_tensors_that_nobody_reads_are_kept_and_a_second_copy_of_a_tied_table_follows(tmp_path):
    save_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    path = tmp_path / "source" / "model.safetensors"
    tensors = {key: torch.from_numpy(x) for key, x in load_file(path).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(4.0)
    save_file(tensors, path, {"format": "pt"})
    export.export(moved(tmp_path / "source", tmp_path / "run"), tmp_path / "out")
    check_beside(tmp_path / "source", tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert (after["lm_head.weight"] != tensors["lm_head.weight"].numpy()).any()
    np.testing.assert_array_equal(
        after["model.layers.0.self_attn.rotary_emb.inv_freq"], np.arange(4.0)
    )


def test_the_command_takes_a_step_and_a_moved_source_and_never_overwrites_unasked(
    source, tuned, tmp_path, capsys
):
    elsewhere = shutil.copytree(source, tmp_path / "elsewhere")
    work = shutil.copytree(tuned, tmp_path / "run")
    config = (work / "config.json").read_text()
    (work / "config.json").write_text(config.replace(str(source), str(tmp_path / "gone")))
    out = tmp_path / "out"
    ended = run(capsys, export.main, work, out)
    assert ended.code == 2
    assert f"{tmp_path / 'gone'}, from which llm came, is not there; say where" in ended.err
    ended = run(capsys, export.main, work, out, "--source", elsewhere, "--step", 1)
    assert ended.code == 0
    assert "after 1 steps" in ended.out
    first = {p.name: p.read_bytes() for p in out.glob("*.safetensors")}
    ended = run(capsys, export.main, work, out, "--source", f"llm={elsewhere}")
    assert ended.code == 2
    assert "is there already; choose another folder, or replace it with --overwrite" in ended.err
    assert {p.name: p.read_bytes() for p in out.glob("*.safetensors")} == first
    ended = run(capsys, export.main, work, out, "--source", f"llm={elsewhere}", "--overwrite")
    assert (ended.code, ended.err) == (0, "")
    assert {p.name: p.read_bytes() for p in out.glob("*.safetensors")} != first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "out", "run"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "7"], "--step 7: .* has checkpoints of 1, 2, 3"),
        (["--source", "vision=/x"], r"no module 'vision' came from a folder; known: llm"),
        (["--source", "/nowhere"], "/nowhere, from which llm came, is not there"),
    ],
)
def test_what_cannot_be_exported_is_said_and_nothing_is_left(
    tuned, tmp_path, capsys, words, message
):
    ended = run(capsys, export.main, tuned, tmp_path / "out", *words)
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert re.search(message, ended.err)
    assert not list(tmp_path.iterdir())


def test_the_source_and_the_run_are_never_replaced(source, tuned, capsys):
    for place in (source, source.parent, tuned):
        ended = run(capsys, export.main, tuned, place, "--overwrite")
        assert ended.code == 2
        assert "which is needed; choose another folder" in ended.err
    assert (source / "config.json").exists()
    assert (tuned / "config.json").exists()


def test_an_interrupted_export_leaves_the_folder_that_was_there(
    source, tuned, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    save_checkpoint(tmp_path / "other", hidden_size=64)
    ended = run(capsys, export.main, tuned, out, "--overwrite", "--source", tmp_path / "other")
    assert ended.code == 2
    assert "does not go with it" in ended.err
    assert [p.name for p in out.iterdir()] == ["mine"]
    assert not list(tmp_path.glob("out.*"))


@pytest.mark.exhaustive
def test_whole_modules_do_not_go_into_an_adapter(source, tmp_path, capsys, tuned):
    plain = moved(source, tmp_path / "plain")
    ended = run(capsys, export.main, plain, tmp_path / "out", "--adapter")
    assert "this run has no adapters" in ended.err
    beside = moved(
        source, tmp_path / "beside", lora={"all": LoraConfig(("llm.*",), 2, base="trained")}
    )
    ended = run(capsys, export.main, beside, tmp_path / "out", "--adapter")
    assert (
        "llm was trained whole beneath its adapters (base=trained), which no adapter holds"
        in ended.err
    )
    export.export(beside, tmp_path / "out")
    np.testing.assert_allclose(theirs(loaded(tmp_path / "out")), ours(beside), atol=1e-4)


@pytest.mark.exhaustive
def test_a_composed_model_is_exported_in_parts_with_its_new_modules_in_our_layout(source, tmp_path):
    vision = VisionConfig(2, 16, 2, 24, 4, channels=1, connector=ConnectorConfig(mlp_width=24))
    config = tuning(
        source, tmp_path / "run", lora={"all": LoraConfig(("llm.*", "vision.connector.*"), 2)}
    )
    batch = replace(config.batch, rows={"llm": 4, "vision": 1})
    config = replace(config, model=replace(config.model, encoders={"vision": vision}), batch=batch)
    moved_run(config)
    told = export.export(tmp_path / "run", tmp_path / "out")
    assert "no class of transformers is this whole model" in told[1]
    parts = json.loads((tmp_path / "out" / "parts.json").read_text())
    assert parts == {"llm": "llm", "vision": "vision", "vision.connector": "vision.connector"}
    check_beside(source, tmp_path / "out" / "llm")
    np.testing.assert_allclose(
        theirs(loaded(tmp_path / "out" / "llm")).shape, (2, 24, from_hf(source).llm.vocab)
    )
    connector = load_file(tmp_path / "out" / "vision.connector" / "model.safetensors")
    assert {k: v.shape for k, v in connector.items()} == {
        "mlp.up.weight": (64, 24), "mlp.up.bias": (24,), "mlp.down.weight": (24, 32), "mlp.down.bias": (32,),
        "norm.scale": (16,), "norm.bias": (16,),
    }  # fmt: skip
    written = json.loads((tmp_path / "out" / "vision.connector" / "config.json").read_text())
    assert written["mmjax_module"] == "vision.connector"
    assert written["mlp_width"] == 24
    tower = load_file(tmp_path / "out" / "vision" / "model.safetensors")
    assert tower["layers.1.attention.query.weight"].shape == (16, 16)


def test_a_model_from_no_folder_is_exported_in_our_layout_and_says_so(tmp_path, capsys):
    config = replace(load(TINY), run=str(tmp_path / "run"))
    moved_run(config)
    ended = run(capsys, export.main, tmp_path / "run", tmp_path / "out")
    assert "llm/  in mmjax's own layout, for it came from no folder" in ended.out
    assert (tmp_path / "out" / "llm" / "model.safetensors").is_file()
