"""Finding the row that breaks a step: run the rows in halves, so that the culprit ends and the others go on."""

from __future__ import annotations

import numpy as np

from enginectl.interfaces.executor import Executor, StepPlan, StepResult


def run_narrowed(executor: Executor, plan: StepPlan) -> StepResult:
    """The plan's results without the rows that raise alone, which are in `errors`.

    Writing KV twice is harmless and noise depends on positions only, so running rows again changes no token.
    """
    num_rows = len(plan.rows)
    try:
        if num_rows == 1:
            return executor.launch(plan.select(np.arange(1))).wait()
    except Exception as error:
        none = np.zeros(0, np.int32)
        return StepResult(
            none, np.zeros((0, 1), np.int32), none, none, errors={int(plan.rows[0]): f"{type(error).__name__}: {error}"}
        )
    half = num_rows // 2
    return _merge([_try(executor, plan.select(index)) for index in np.split(np.arange(num_rows), [half])])


def _try(executor: Executor, plan: StepPlan) -> StepResult:
    try:
        return executor.launch(plan.select(np.arange(len(plan.rows)))).wait()
    except Exception:
        return run_narrowed(executor, plan)


def _merge(results: list[StepResult]) -> StepResult:
    width = max(result.token_ids.shape[1] for result in results)
    tokens = [np.pad(r.token_ids, ((0, 0), (0, width - r.token_ids.shape[1]))) for r in results]
    merged = StepResult(
        np.concatenate([r.rows for r in results]),
        np.concatenate(tokens),
        np.concatenate([r.num_new for r in results]),
        np.concatenate([r.num_drafts for r in results]),
    )
    for result in results:
        merged.logprobs.update(result.logprobs)
        merged.prompt_logprobs.update(result.prompt_logprobs)
        merged.errors.update(result.errors)
    return merged
