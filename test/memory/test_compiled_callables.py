"""Which compiles belong to a function or module; the compiles here are begun by hand."""

from __future__ import annotations

from inductor_ext.memory import compiled_callables


def nested_calls() -> None:
    """Begin a compile in a nested call, as after a graph break."""
    compiled_callables.begin_compile().add("inner", None)


class TestOwners:
    def test_a_function_owns_what_is_compiled_while_it_runs(self) -> None:
        def other() -> None:
            nested_calls()

        nested_calls()
        other()
        assert [len(compiled_callables.find_compiles(f)) for f in (other, nested_calls)] == [1, 2]
        compiled_callables.forget_compiles()
        assert compiled_callables.find_compiles(other) == []

    def test_a_module_owns_what_is_compiled_in_its_call(self) -> None:
        import torch

        class Block(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                nested_calls()
                return x

        model = torch.nn.Sequential(Block(), Block())
        model[0](torch.ones(1))
        assert [len(compiled_callables.find_compiles(m)) for m in (model[0], model[1], model)] == [
            1,
            0,
            0,
        ]
        model(torch.ones(1))
        assert [len(compiled_callables.find_compiles(m)) for m in (model[0], model[1], model)] == [
            2,
            1,
            2,
        ]
