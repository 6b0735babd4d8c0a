"""One process of several that generate together; prints what it got as one line of JSON.

Run as `python -m tests.multi_device.worker COORDINATOR PROCESSES PROCESS CASE`, where CASE is the JSON of a dict:
`folder`, `mesh` (sizes of `make_mesh`), `prompts`, `options` (of `generate`) and, if wanted, `policy` and `seed`.
"""

import json
import sys

import jax


def start(coordinator: str, processes: int, process: int, devices: int) -> None:
    """Join the other processes, with virtual CPU devices; before jax touches a device."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(coordinator, num_processes=processes, process_id=process)


def main(coordinator: str, processes: str, process: str, case: str) -> None:
    """Generate and print."""
    start(coordinator, int(processes), int(process), 8 // int(processes))
    import jax.numpy as jnp

    from dsa_jax import EngineOptions, Execution, PrefillPolicy, from_pretrained, generate, make_mesh

    wanted = json.loads(case)
    mesh = make_mesh(**wanted["mesh"])
    model = from_pretrained(wanted["folder"], mesh, jnp.float32)
    policy = PrefillPolicy(**wanted.get("policy", {}))
    engine = EngineOptions(chunk_size=46, page_size=16, execution=Execution(policy=policy))
    result = generate(model, wanted["prompts"], max_new_tokens=6, ignore_eos=True, engine=engine)
    print(json.dumps({"process": jax.process_index(), "devices": len(jax.devices()), "tokens": result.tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
