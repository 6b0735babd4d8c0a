"""One process of several that run a model together; prints what it got as one line of JSON.

Run as `python -m tests.multi_device.worker COORDINATOR PROCESSES PROCESS CASE`. CASE is the JSON of a dict: `folder` of
the checkpoint, `mesh` (sizes of `make_mesh`), `policy` (fields of `PrefillPolicy`), `prompts`, `new_tokens`,
and `disagree`: what to get wrong first, of "mesh", "policy" and "prompt".
"""

import json
import sys

import jax
import numpy as np

DEVICES = 8


def start(coordinator: str, processes: int, process: int) -> None:
    """Join the other processes with virtual CPU devices, before jax touches a device."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(coordinator, num_processes=processes, process_id=process)


def disagree(case: dict, what: str) -> str:
    """The error when the last process has another mesh, policy or prompt than the others."""
    import dsa_jax
    from dsa_jax.multihost import DisagreementError

    odd = jax.process_index() == jax.process_count() - 1
    devices = jax.devices()[:: -1 if odd and what == "mesh" else 1]
    mesh = dsa_jax.make_mesh(**case["mesh"], devices=devices)
    model = dsa_jax.from_pretrained(case["folder"], mesh, np.float32)
    policy = dsa_jax.PrefillPolicy(query_split=not (odd and what == "policy"))
    token = int(odd and what == "prompt")
    try:
        runner = dsa_jax.StepRunner(model, dsa_jax.Execution(policy=policy))
        batch = dsa_jax.Batch.from_prompts([[1, 2, token]], model)
        dsa_jax.prefill(runner, batch, batch.init_cache(model))
    except DisagreementError as error:
        return str(error)
    return "nothing was raised"


def run(case: dict) -> dict:
    """Prefill, then generate greedily and with a seed."""
    import dsa_jax

    model = dsa_jax.from_pretrained(case["folder"], dsa_jax.make_mesh(**case["mesh"]), np.float32)
    execution = dsa_jax.Execution(policy=dsa_jax.PrefillPolicy(**case["policy"]))
    prompts = case["prompts"]
    batch = dsa_jax.Batch.from_prompts(prompts, model)
    runner = dsa_jax.StepRunner(model, execution)
    found = dsa_jax.prefill(runner, batch, batch.init_cache(model), logits="all", return_selected=True)
    assert found.selected is not None

    def generate(**sampling) -> list[list[int]]:
        return dsa_jax.generate(
            model,
            prompts,
            max_new_tokens=case["new_tokens"],
            ignore_eos=True,
            sampling=dsa_jax.SamplingConfig(**sampling),
            engine=dsa_jax.EngineOptions(execution=execution),
        ).tokens

    return {
        "logits": [logits.tolist() for logits in found.logits],
        "selected": [selected.tolist() for selected in found.selected],
        "greedy": generate(),
        "seeded": generate(temperature=1.0, top_p=0.9, seed=3),
    }


def main(coordinator: str, processes: str, process: str, text: str) -> None:
    """Run a case and print what came of it."""
    start(coordinator, int(processes), int(process))
    case = json.loads(text)
    errors = {what: disagree(case, what) for what in case["disagree"]}
    print(json.dumps({"process": jax.process_index(), "errors": errors, **run(case)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
