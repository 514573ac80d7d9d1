"""Cases from the field that every backend must get right: small inputs that have gone wrong somewhere.

Tests tie themselves to a case by name, ``@pytest.mark.case("narrow_rows")``; a test asserts that every case is
covered. A case stands for its kind, not for the one input that made it known.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One case: its number in the list, the name that tests use, what must hold, and tags to select by."""

    number: int
    name: str
    statement: str
    tags: tuple[str, ...]


CASES: tuple[Case, ...] = (
    Case(
        1,
        "narrow_rows",
        "Tables of dim 1, 2, 3 and 7, as in wide-and-deep models: any dim of at least 1 is served.",
        ("dims", "forward", "update"),
    ),
    Case(
        2,
        "wide_rows",
        "Dims 1100, 2048 and 4000 give right results or a refusal with its reason; never silent zeros.",
        ("dims", "forward", "update"),
    ),
    Case(
        3,
        "nothing_to_look_up",
        "No lookups, no bags, or a last batch without any: the output is empty or zero for every pooling, mean "
        "included, and the backward changes nothing.",
        ("empty", "forward", "update"),
    ),
    Case(
        4,
        "id_equals_rows",
        "An id equal to its table's rows never reads, and never trains, the row that follows in memory, in any "
        "mode that checks.",
        ("bounds", "forward", "update"),
    ),
    Case(
        5,
        "shared_table",
        "Two features over one table, map [1, 0, 1], tables of unequal size: the limit of an id is that of its "
        "feature's table, and the gradients of both features make one step.",
        ("sharing", "bounds", "update"),
    ),
    Case(
        6,
        "past_int32",
        "More than 2^31 elements in one table, or rows in all tables together: ids near the end are right, "
        "weighted or not.",
        ("size", "forward", "update"),
    ),
    Case(
        7,
        "mixed_index_dtypes",
        "int32 indices with int64 offsets, and the reverse.",
        ("dtypes", "forward", "update"),
    ),
    Case(
        8,
        "stochastic_rounding",
        "Stochastic rounding of fp16 and bf16 tables: two seeds differ, the mean over many steps has no bias, "
        "fp32 tables are never rounded, and values above 65504 survive in bf16 and fp32.",
        ("dtypes", "update"),
    ),
    Case(
        9,
        "weights_without_gradient",
        "Per-sample weights that need no gradient cost no gradient; those that do get it from the row before "
        "its update.",
        ("weighted", "update"),
    ),
    Case(
        10,
        "duplicates_in_a_bag",
        "One id many times in a bag under different weights, past 32 and past 4096 of them: each weight counts "
        "once, for its own bag.",
        ("weighted", "duplicates", "forward", "update"),
    ),
    Case(
        11,
        "hot_row",
        "One id looked up 125,000 times among many others: exact and repeatable (its speed is a benchmark's "
        "business).",
        ("duplicates", "update"),
    ),
    Case(
        12,
        "adam_resumes",
        "Adam saved, loaded and stepped equals Adam that never stopped; tables of dims 8, 16 and 64 leave each "
        "other's state alone.",
        ("checkpoint", "update"),
    ),
    Case(
        13,
        "errors_name_the_argument",
        "per_sample_weights of a wrong length, indices of a float dtype, offsets on another device: an error "
        "that names the argument.",
        ("errors",),
    ),
    Case(
        14,
        "compiled_model",
        "torch.compile of a model that contains the module: no graph break in it, and one update a step.",
        ("compile", "update"),
    ),
    Case(
        15,
        "loads_without_gpu",
        "What one backend trained and saved loads and runs on a machine with neither a GPU nor Triton.",
        ("checkpoint", "portable"),
    ),
    Case(
        16,
        "runs_without_triton",
        "Import and a training step on a Python without Triton (macOS, Windows, Arm).",
        ("portable",),
    ),
)
