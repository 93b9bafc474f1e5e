# SPDX-License-Identifier: Apache-2.0
"""Gradients of one batch from several single-threaded CPU processes.

On a CPU that other work shares, one process per core wastes less than one process with a thread per core: there is one
barrier per batch instead of one per operator, and a delayed core simply takes fewer micro-batches from the queue.
"""

from __future__ import annotations

import ctypes
import time
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

HEADER_SIZE = 4  # number of rows, row length, rows per micro-batch, 1 to stop


class GradientPool:
    """Computes the mean loss and its gradient over a batch of token rows.

    The task is a module that maps rows `[B, L]` int64 to a scalar mean loss. Its parameters lie in shared memory; each
    worker sums gradients into its own row of `grads`, and this process adds the rows up into `param.grad`.
    """

    def __init__(self, task: nn.Module, num_workers: int, max_batch_tokens: int) -> None:
        device = next(task.parameters()).device
        if device.type != "cpu":
            num_workers = 1
        self.task, self.num_workers = task.share_memory(), num_workers
        num_params = sum(param.numel() for param in task.parameters() if param.requires_grad)
        self.grads = torch.zeros(num_workers, num_params, device=device).share_memory_()
        self.losses = torch.zeros(num_workers, dtype=torch.float64).share_memory_()
        self.busy = torch.zeros(num_workers, dtype=torch.float64).share_memory_()
        self.rows = torch.zeros(max_batch_tokens, dtype=torch.int64).share_memory_()
        self.header = torch.zeros(HEADER_SIZE, dtype=torch.int64).share_memory_()
        context = mp.get_context("spawn")
        self.queue = context.Value(ctypes.c_int64, 0)
        self.barrier = context.Barrier(num_workers)
        shared = (self.grads, self.losses, self.busy, self.rows, self.header, self.queue, self.barrier)
        self.processes = [
            context.Process(target=_work, args=(rank, task, *shared), daemon=True) for rank in range(1, num_workers)
        ]
        for process in self.processes:
            process.start()
        bind_gradients(task, self.grads[0])
        prepare_process()

    def gradients(self, rows: Tensor, micro_batch: int) -> float:
        """Fills `param.grad` with the gradient of the mean loss over `rows` `[R, L]`; returns that loss."""
        self.grads.zero_()
        self.losses.zero_()
        self.rows[: rows.numel()] = rows.flatten()
        self.header[:] = torch.tensor([*rows.shape, micro_batch, 0])
        self.queue.value = 0
        self.barrier.wait()
        run_micro_batches(0, self.task, self.losses, self.rows, self.header, self.queue)
        self.barrier.wait()
        for other in self.grads[1:]:
            self.grads[0] += other
        return float(self.losses.sum())

    def take_processor_s(self) -> float:
        """Returns the processor time in seconds that the other processes spent since the last call."""
        spent = float(self.busy.sum())
        self.busy.zero_()
        return spent

    def close(self) -> None:
        """Ends the worker processes."""
        self.header[3] = 1
        self.barrier.wait()
        for process in self.processes:
            process.join()


def prepare_process() -> None:
    """Makes this process single-threaded and flushes denormal numbers, which would double the time of a batch."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def bind_gradients(task: nn.Module, flat: Tensor) -> None:
    """Makes every trainable parameter's gradient a view into `flat` `[num_params]`."""
    start = 0
    for param in task.parameters():
        if param.requires_grad:
            param.grad = flat[start : start + param.numel()].view_as(param)
            start += param.numel()


def run_micro_batches(
    rank: int, task: nn.Module, losses: Tensor, rows: Tensor, header: Tensor, queue: Synchronized
) -> None:
    """Takes micro-batches from the queue until it is empty, adding loss and gradients."""
    num_rows, row_length, micro_batch, _ = header.tolist()
    device = next(task.parameters()).device
    batch = rows[: num_rows * row_length].view(num_rows, row_length).to(device)
    if device.type != "cpu":
        micro_batch = num_rows
    while True:
        with queue.get_lock():
            start = queue.value
            queue.value = start + micro_batch
        if start >= num_rows:
            return
        part = batch[start : start + micro_batch]
        loss = task(part) * (len(part) / num_rows)
        loss.backward()
        losses[rank] += loss.item()


def _work(
    rank: int,
    task: nn.Module,
    grads: Tensor,
    losses: Tensor,
    busy: Tensor,
    rows: Tensor,
    header: Tensor,
    queue: Synchronized,
    barrier: Barrier,
) -> None:
    """Body of a worker process: one round per batch."""
    prepare_process()
    bind_gradients(task, grads[rank])
    while True:
        barrier.wait()
        if header[3]:
            return
        started = time.process_time()
        run_micro_batches(rank, task, losses, rows, header, queue)
        busy[rank] += time.process_time() - started
        barrier.wait()
