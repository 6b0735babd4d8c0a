"""Generate with one model over several processes: run the same command in each, with its own `--process`.

    python scripts/generate_multihost.py CKPT --coordinator HOST:PORT --processes 2 --process 0 --tp 8 --dcp 2

Where a cluster's scheduler describes the job (SLURM, Open MPI, Kubernetes), leave the three flags out: jax finds the
coordinator. With `--cpu-devices N` each process brings N virtual CPU devices, joined by gloo, which is how it is tried
without GPUs. See docs/multihost.md.
"""

import argparse
import json

import jax

import dsa_jax


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder that every host can read")
    parser.add_argument("--coordinator", help="HOST:PORT of process 0, reachable by all; default: ask the scheduler")
    parser.add_argument("--processes", type=int, help="number of processes")
    parser.add_argument("--process", type=int, help="number of this process, from 0")
    parser.add_argument("--cpu-devices", type=int, help="virtual CPU devices of this process instead of GPUs")
    parser.add_argument("--tp", type=int, required=True, help="tensor-parallel size over all processes")
    parser.add_argument("--dcp", type=int, default=1, help="decode-context-parallel size")
    parser.add_argument("--data", type=int, default=1, help="data-parallel size")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--prompt-ids", default="[[11, 42, 7, 99, 3, 150, 23, 8], [5, 6, 7]]", help="JSON, lists of ids"
    )
    parser.add_argument("--max-new-tokens", type=int, default=16)
    return parser.parse_args(arguments)


def join(args: argparse.Namespace) -> None:
    """Join the other processes; before anything touches a device."""
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(args.coordinator, num_processes=args.processes, process_id=args.process)


def main() -> None:
    """Generate, and print what process 0 got: all processes got the same."""
    args = parse()
    join(args)
    mesh = dsa_jax.make_mesh(tp=args.tp, dcp=args.dcp, data=args.data)
    model = dsa_jax.from_pretrained(args.checkpoint, mesh, args.dtype)
    prompts = json.loads(args.prompt_ids)
    found = dsa_jax.generate(model, prompts, max_new_tokens=args.max_new_tokens, ignore_eos=True)
    if jax.process_index() == 0:
        devices = f"{len(jax.devices())} devices of {jax.process_count()} processes"
        print(json.dumps({"devices": devices, "tokens": found.tokens}))


if __name__ == "__main__":
    main()
