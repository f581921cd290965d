"""Coming from TorchRec, DynamicEmb, nn.EmbeddingBag: no name is missing, diffs are those of the examples."""

from __future__ import annotations

import ast
import difflib
import runpy
from pathlib import Path

import pytest

from tests.compat.monolith.test_coming_from_monolith import exists, spans

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "migration"
PAGES = {"torchrec": "torchrec", "dynamicemb": "dynamicemb", "embedding-bag": "embedding_bag"}

# Copied by hand from the systems' modules: each must be in the first column of a table of its page.
NAMES = {
    "torchrec": """
        EmbeddingBagCollection EmbeddingCollection EmbeddingBagConfig EmbeddingConfig PoolingType DataType
        KeyedJaggedTensor KeyedTensor JaggedTensor apply_optimizer_in_backward RowWiseAdagrad
        DistributedModelParallel EmbeddingShardingPlanner ShardingPlan Topology ParameterConstraints
        EmbeddingBagCollectionSharder EmbeddingCollectionSharder QCommsConfig TrainPipelineSparseDist
        TrainPipelineBase MCHManagedCollisionModule HashZchManagedCollisionModule ManagedCollisionCollection
        ManagedCollisionEmbeddingBagCollection ManagedCollisionEmbeddingCollection LFU_EvictionPolicy
        LRU_EvictionPolicy DistanceLFU_EvictionPolicy TimestampBasedEvictionPolicy KeyedOptimizerWrapper
        CombinedOptimizer in_backward_optimizer_filter quantize_embeddings SparseArch DLRM DLRMTrain DeepFM
    """,
    "dynamicemb": """
        DynamicEmbTableOptions dim embedding_dtype index_type max_capacity init_capacity max_load_factor
        bucket_capacity local_hbm_for_values global_hbm_for_values caching external_storage Storage
        initializer_args eval_initializer_args DynamicEmbInitializerArgs DynamicEmbInitializerMode
        score_strategy evict_strategy DynamicEmbScoreStrategy DynamicEmbEvictStrategy admit_strategy
        admission_counter FrequencyAdmissionStrategy KVCounter dist_type training safe_check_mode
        DynamicEmbCheckMode DynamicEmbParameterConstraints DynamicEmbeddingEnumerator
        DynamicEmbeddingShardingPlanner get_planner DynamicEmbeddingCollectionSharder
        DynamicEmbeddingBagCollectionSharder use_index_dedup qcomm_codecs_registry EmbOptimType
        gradient_clipping max_gradient DynamicEmbPoolingMode BatchedDynamicEmbeddingTablesV2 prefetch flush
        DynamicEmbDump DynamicEmbLoad incremental_dump get_score set_score get_table_value_bytes
        InferenceEmbeddingCollection DEMB_DETERMINISM_MODE DYNAMICEMB_DEBUG
    """,
    "embedding-bag": "input offsets per_sample_weights padding_idx max_norm scale_grad_by_freq state_dict",
}


def text(page: str) -> str:
    return (ROOT / "docs" / f"coming-from-{page}.md").read_text()


def rows(page: str) -> list[list[str]]:
    """The cells of the table of names, which is the last one."""
    lines = [line for line in text(page).rpartition("## Names")[2].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("page", PAGES)
def test_no_name_is_missing_and_no_cell_is_empty(page: str) -> None:
    found = rows(page)
    assert all(len(row) == 3 and all(row) for row in found)
    named = {name for row in found for name in spans(row[0])}
    assert [name for name in NAMES[page].split() if name not in named] == []


@pytest.mark.parametrize("page", PAGES)
def test_our_names_exist(page: str) -> None:
    wrong = [name for row in rows(page) for name in spans(row[1]) if not exists(name)]
    assert wrong == []
    assert [row for row in rows(page) if not spans(row[1]) and row[1] != "nothing"] == []


@pytest.mark.parametrize(("page", "name"), PAGES.items())
def test_the_diff_is_that_of_the_examples(page: str, name: str) -> None:
    before, after = ((EXAMPLES / f"{name}_{which}.py").read_text() for which in ("before", "after"))
    ast.parse(before)  # DynamicEmb and TorchRec are not installed here; tests/integrations runs the latter
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:]
    changed = [line for line in lines if line[1:].strip() and not line.startswith("@@")]
    shown = text(page).partition("```diff\n")[2].partition("\n```")[0]
    assert shown.splitlines() == changed


@pytest.mark.parametrize("name", ["embedding_bag_before", "embedding_bag_after", "dynamicemb_after"])
def test_the_examples_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"))
    assert 0 < float(capsys.readouterr().out.split()[1]) < {"dynamicemb_after": 3.0}.get(name, 0.65)
