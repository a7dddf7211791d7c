"""`argmin` and `argmax` over several dimensions."""

from __future__ import annotations

import torch


def test_index_is_row_major_whatever_the_layout_of_the_input() -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(17, 66).t(),
        torch.randint(-128, 128, (17, 66), dtype=torch.int8).t(),
        torch.randn(2, 8, 9, 10).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 5, 6, 7),
        torch.randn(7, 1).expand(7, 5),
    ]

    def model(*xs: torch.Tensor) -> list[torch.Tensor]:
        a, b, c, d, e = xs
        results = [a.abs().argmin(), (a + 0.5).argmin(), a.argmax(), b.double().argmin()]
        results += [(b + 1).argmin(), (c * 2).argmax(), c.mean(-1).argmax(), c.amax(-1).argmax()]
        results += [(c * 2).flatten(1).argmax(1), d.argmax(), (d + 1).transpose(0, 1).argmin()]
        results += [e.argmax(), (e + 1).argmin()]
        return results

    results = torch.compile(model, backend="inductor_ext", fullgraph=True)(*inputs)
    assert [r.tolist() for r in results] == [r.tolist() for r in model(*inputs)]


def test_index_in_a_kernel_with_two_tiled_loops() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        x, y = x.permute(2, 0, 1), y.t()
        results = [x.contiguous(), x.flatten(1).argmax(1), y + 1, (y + 1).argmin(1)]
        return [*results, x.flatten(1).double().contiguous(), x.flatten(1).double().argmin(1)]

    torch.manual_seed(0)
    inputs = torch.randn(3, 5, 7), torch.randn(37, 35)
    results = torch.compile(model, backend="inductor_ext", fullgraph=True)(*inputs)
    assert [r.tolist() for r in results] == [r.tolist() for r in model(*inputs)]


def test_indices_of_pooling_with_large_windows() -> None:
    torch.manual_seed(0)
    image, volume = torch.randn(2, 3, 13, 13), torch.randn(1, 2, 6, 6, 6)
    inputs = [
        image.contiguous(memory_format=torch.channels_last),
        image.transpose(2, 3),
        volume.transpose(3, 4),
        volume.permute(0, 1, 4, 3, 2),
    ]

    def model(*xs: torch.Tensor) -> list[torch.Tensor]:
        functional, results = torch.nn.functional, []
        for x in xs[:2]:
            results += functional.max_pool2d(x, 6, return_indices=True)
            results += functional.max_pool2d(x + 1, (7, 5), 3, 2, return_indices=True)
        for x in xs[2:]:
            results += functional.adaptive_max_pool3d(x, 2, return_indices=True)
            results += functional.max_pool3d(x, (4, 3, 4), 2, return_indices=True)
        return results

    results = torch.compile(model, backend="inductor_ext", fullgraph=True)(*inputs)
    assert [r.tolist() for r in results] == [r.tolist() for r in model(*inputs)]
