"""Large programs split into functions and translation units: the same statements in order."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.export import Dim

from inductor_ext.cpp_wrapper.build import compiler
from inductor_ext.cpp_wrapper.codegen import split_units
from inductor_ext.cpp_wrapper.codegen.split_units import Section
from test.support import aot_util, split_programs
from test.support.split_programs import PROLOGUE, numbered, program, whole_text

MANY = tuple(f"use(nullptr, {number});" for number in range(12))
"""Enough statements to fill some functions of `small`."""


def small(
    whole: split_units.Program, unit: int = 12, function: int = 4, path: str = ""
) -> list[str]:
    """Split with limits that suit small programs."""
    return whole.units(unit, function=function, path=path)


def run_of(units: Sequence[str]) -> str:
    """The body of `run_impl`."""
    _, _, rest = units[0].partition("void AOTInductorModel::run_impl(")
    return rest.partition("\n}\n")[0]


def functions(units: Sequence[str]) -> dict[int, str]:
    """The bodies of the extracted functions, by number."""
    head = r"^void AOTInductorModel::run_part<(\d+)>\([^{;]*\) \{\n(.*?)^\}$"
    matches = (match for unit in units for match in re.findall(head, unit, re.M | re.S))
    return {int(number): body for number, body in matches}


def order(units: Sequence[str]) -> list[int]:
    """The numbers of a numbered program's statements, in the order in which they run."""
    bodies = functions(units)
    text = re.sub(r"run_part<(\d+)>\(", lambda match: bodies[int(match[1])], run_of(units))
    return [int(number) for number in re.findall(r"// <(\d+)>", text)]


def apart(*declared: str, use: str) -> tuple[list[str], str, str]:
    """Split a program that declares a variable and uses it two functions later.

    Returns:
        The units, the function that declares and the one that uses.
    """
    marks = "// declared", "// used"
    statements = (*PROLOGUE, *MANY, f"{declared[0]} {marks[0]}", *declared[1:], *MANY)
    units = small(program(*statements, f"{use} {marks[1]}", *MANY))
    (first,), (second,) = (
        [body for body in functions(units).values() if mark in body] for mark in marks
    )
    assert first != second
    return units, first, second


class TestSize:
    def test_a_small_program_is_not_split(self) -> None:
        whole = program(*PROLOGUE, *MANY)
        assert whole.units(1000) == []
        assert small(whole, function=12) == []

    def test_zero_never_splits(self) -> None:
        whole = program(*PROLOGUE, *MANY * 50)
        assert len(whole.units(100)) > 1
        assert whole.units(0) == []

    def test_functions_and_units_have_the_requested_size(self) -> None:
        units = small(program(*PROLOGUE, *MANY * 20), unit=60, function=10)
        assert len(units) == 1 + 4
        sizes = [body.count("use(") for body in functions(units).values()]
        assert len(sizes) == 24
        assert set(sizes) <= {9, 10, 11}
        assert [len(functions([unit])) for unit in units] == [0, 6, 6, 6, 6]

    def test_a_single_unit_has_functions(self) -> None:
        (unit,) = small(program(*PROLOGUE, *MANY * 2), unit=1000, function=8)
        assert len(functions([unit])) == 3

    def test_nested_statements_count(self) -> None:
        block = f"if (s0 > 3) {{ {' '.join(MANY)} }}"
        units = small(program(*PROLOGUE, *(block,) * 4), unit=24, function=12)
        assert [body.count("if (s0") for body in functions(units).values()] == [1] * 4

    def test_line_numbers_are_those_of_the_whole_program(self) -> None:
        whole = program(*PROLOGUE, *MANY, "RAIIAtenTensorHandle buf0(\n    nullptr);", *MANY)
        text = whole_text(whole)
        for unit in small(whole, path='/a "b"\\c.cpp'):
            number = 0
            for line in unit.split("\n"):
                if match := re.fullmatch(r'#line (\d+) "/a \\"b\\"\\\\c.cpp"', line):
                    number = int(match[1])
                    continue
                if number and line.strip() in MANY:
                    assert text.split("\n")[number - 1] == line
                number += number > 0


VIEW = "wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(arg0_1, 2, n, n, 0L))"

KINDS: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    # The declaration, its use, the declaration in the split program, and its binding at the use.
    "owner": (
        ("RAIIAtenTensorHandle x(handle);",),
        "x.reset();",
        "new (&x) RAIIAtenTensorHandle(handle);",
        "auto& x = inductor_ext_frame.tensors[0];",
    ),
    "owner of nothing yet": (
        ("RAIIAtenTensorHandle x;",),
        "x = std::move(arg0_1);",
        "auto& x = inductor_ext_frame.tensors[0];",
        "auto& x = inductor_ext_frame.tensors[0];",
    ),
    "owner made by a call": (
        ("RAIIAtenTensorHandle x = scalar_to_tensor_handle(3L);",),
        "use(x);",
        "new (&x) RAIIAtenTensorHandle(scalar_to_tensor_handle(3L));",
        "auto& x = inductor_ext_frame.tensors[0];",
    ),
    "owner that is moved": (
        ("auto x = std::move(arg0_1);  // reuse",),
        "output_handles[0] = x.release();",
        "new (&x) RAIIAtenTensorHandle(std::move(arg0_1));  // reuse",
        "auto& x = inductor_ext_frame.tensors[0];",
    ),
    "view": (
        (f"auto x = {VIEW}; arg0_1.reset();  // reuse",),
        "use(x);",
        f"new (&x) RAIIAtenTensorHandle({VIEW}); arg0_1.reset();  // reuse",
        "auto& x = inductor_ext_frame.tensors[0];",
    ),
    "handle": (
        ("AtenTensorHandle x;",),
        "use(&x);",
        "auto& x = inductor_ext_frame.x;",
        "auto& x = inductor_ext_frame.x;",
    ),
    "number": (
        ("const int64_t x = std::max<int64_t>(s0, 3L);",),
        "use(nullptr, x);",
        "    x = std::max<int64_t>(s0, 3L);",
        "auto& x = inductor_ext_frame.x;",
    ),
    "number that is given later": (
        ("bool x;", "AOTI_TORCH_ERROR_CODE_CHECK(item(arg0_1, &x));"),
        "if (x) { use(nullptr); }",
        "auto& x = inductor_ext_frame.x;",
        "auto& x = inductor_ext_frame.x;",
    ),
    "number of a number's type": (
        ("auto x = s0;",),
        "use(nullptr, x);",
        "    x = s0;",
        "auto& x = inductor_ext_frame.x;",
    ),
    "size": (
        ("auto x = arg0_1.size(0);",),
        "use(nullptr, x);",
        "    x = arg0_1.size(0);",
        "auto& x = inductor_ext_frame.x;",
    ),
    "sizes": (
        ("auto x = arg0_1.sizes();",),
        "use(nullptr, x[1]);",
        "    x = arg0_1.sizes();",
        "auto& x = inductor_ext_frame.x;",
    ),
    "data": (
        ("auto* x = get_data_ptr_wrapper(weight);",),
        "use(x);",
        "    x = get_data_ptr_wrapper(weight);",
        "auto& x = inductor_ext_frame.x;",
    ),
    "table of numbers": (
        ("const int64_t x[] = {s0, std::max<int64_t>(s0, 3L), 7L};",),
        "use(x);",
        "7L}; std::copy(std::begin(values_), std::end(values_), x); }",
        "auto& x = inductor_ext_frame.x;",
    ),
    "pointer": (
        ("int64_t y = s0;", "int64_t* x = &y;"),
        "use(x);",
        "    x = &y;",
        "auto& x = inductor_ext_frame.x;",
    ),
    "constant table": (
        ("static constexpr int64_t x[] = {8L, -1L};",),
        "use(x);",
        "static constexpr int64_t x[] = {8L, -1L};",
        "static constexpr int64_t x[] = {8L, -1L};",
    ),
    "empty table": (
        ("const int64_t *x=nullptr;",),
        "use(x);",
        "const int64_t *x=nullptr;",
        "const int64_t *x=nullptr;",
    ),
    "constant of the model": (
        ("[[maybe_unused]] auto& x = constants_->at(7);",),
        "use(x.data_ptr());",
        "[[maybe_unused]] auto& x = constants_->at(7);",
        "[[maybe_unused]] auto& x = constants_->at(7);",
    ),
}


class TestKinds:
    @pytest.mark.parametrize("kind", KINDS)
    def test_variables_across_functions(self, kind: str) -> None:
        declared, use, declaration, binding = KINDS[kind]
        units, first, second = apart(*declared, use=use)
        assert declaration in first
        before, _, _ = second.partition(f"{use} // used")
        assert binding in before
        assert "// declared" not in run_of(units)

    def test_earlier_declarations_are_referenced(self) -> None:
        units, _, second = apart("AtenTensorHandle x;", use="use(arg1_1, s0, arg0_1_size);")
        for name in ("arg1_1", "s0", "arg0_1_size"):
            assert f"auto& {name} = inductor_ext_frame.{name};" in second
        assert "RAIIAtenTensorHandle& arg1_1;" in units[0]
        assert "int64_t& s0;" in units[0]
        assert "int64_t*& arg0_1_size;" in units[0]

    def test_variables_used_later_in_run_impl_are_bound(self) -> None:
        barrier = "auto f = [&]() { return x; };"
        whole = program(*PROLOGUE, *MANY, "int64_t x = s0;", *MANY, barrier, "use(nullptr, f());")
        run = run_of(small(whole))
        assert run.index("auto& x = inductor_ext_frame_1.x;") < run.index(barrier)

    def test_a_unit_has_the_launchers_that_it_calls(self) -> None:
        call = "kernel_of_all(weight.data_ptr(), cached_torch_dtype_float8_e4m3fn);"
        launch = "call_launched(arg0_1, 3L, kernels);"
        units = small(program(*PROLOGUE, *MANY, call, *MANY, *MANY, launch), unit=8)
        (calling,) = (unit for unit in units if f"    {call}" in unit)
        (launching,) = (unit for unit in units if f"    {launch}" in unit)
        assert "static inline void call_launched(" not in calling
        assert "static inline void call_launched(" in launching
        for unit in units[1:]:
            assert '#include "model.h"' in unit
            assert "class AOTInductorModelKernels " in unit
            assert "kNames" not in unit
        for unit in units:
            before = unit[: unit.index("class AOTInductorModelKernels ")]
            assert "namespace {" not in before


STAYING = (
    "Guard guard(s0);",
    "auto f = [&](int64_t n) { return n + s0; };",
    "auto x = unknown_call(s0);",
    "std::vector<AtenTensorHandle> list{arg0_1};",
    "struct Own { int64_t x; };",
    "if (s0 == 3L) return;",
    "int64_t x = 3L, y = 4L;",
    "DECLARING_MACRO(x);",
    "auto& x = arg0_1;",
)


class TestBarriers:
    @pytest.mark.parametrize("statement", STAYING)
    def test_unrecognized_statements_stay_in_run_impl(self, statement: str) -> None:
        statements = (*PROLOGUE, *MANY, statement, *MANY)
        units = small(numbered(*statements))
        assert statement in run_of(units)
        assert not any(statement in body for body in functions(units).values())
        assert run_of(units).count("run_part<") == 6
        assert order(units) == sorted(order(units))

    @pytest.mark.parametrize(
        ("declared", "use"),
        [
            ("auto f = [&](int64_t n) { return n; };", "use(nullptr, f(3L));"),
            ("auto x = unknown_call(s0);", "auto y = std::move(x);"),
            ("auto x = unknown_call(s0);", "int64_t y = x[0];"),
            ("std::vector<int64_t> x{3};", "{ Guard inner(x[0]); }"),
        ],
    )
    def test_uses_of_unrecognized_statements_stay(self, declared: str, use: str) -> None:
        run = run_of(small(program(*PROLOGUE, *MANY, declared, *MANY, use, *MANY)))
        assert declared in run
        assert use in run

    def test_few_statements_between_barriers_stay(self) -> None:
        statements = [part for i in range(9) for part in (f"Guard guard{i}(1);", *MANY[:3])]
        assert small(program(*PROLOGUE, *statements)) == []

    @pytest.mark.parametrize(
        "statement",
        [
            "use(sizeof(decltype(arg0_1)));",
            "#ifdef X\n    use(nullptr);\n#endif",
            "do { use(nullptr); } while (false);",
            "auto [a, b] = pair_of(s0);",
            "if (s0) {",
            "}",
        ],
    )
    def test_unparsable_programs_are_not_split(self, statement: str) -> None:
        assert small(program(*PROLOGUE, *MANY, statement, *MANY)) == []


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 32),
    length=st.integers(10, 150),
    unit=st.integers(1, 80),
    function=st.integers(1, 30),
)
def test_every_statement_runs_once_and_in_order(
    seed: int, length: int, unit: int, function: int
) -> None:
    drawn = split_programs.Program(seed, length)
    units = drawn.program.units(unit, function=function)
    if not units:
        return
    numbers = order(units)
    # Declarations that may be repeated are dropped if unused.
    repeated = re.compile(
        r"static constexpr|(\[\[maybe_unused\]\] )?auto& |const int64_t \w+\[\] = \{[-\dL, ]*\};"
    )
    needed = [i for i, text in enumerate(drawn.statements) if not repeated.match(text)]
    assert [number for number in numbers if number in set(needed)] == needed
    assert numbers == sorted(numbers)


@settings(max_examples=200)
@given(st.integers(0, 20), st.data())
def test_a_damaged_program_raises_no_error(seed: int, data: st.DataObject) -> None:
    statements = split_programs.Program(seed, 60).statements
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(statements) - 1))
        start, end = sorted(data.draw(st.tuples(st.integers(0, 40), st.integers(0, 40))))
        inserted = data.draw(st.sampled_from(["", "}", "(", '"', ";", "auto", "{"]))
        text = statements[place]
        statements[place] = text[:start] + inserted + text[end:]
    units = small(program(*statements))
    assert not units or functions(units)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, pathlib.Path]:
    """A compiler, and a folder with a runtime that traces a program."""
    program_path = shutil.which("g++")
    if program_path is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("split")
    (folder / "model.h").write_text(split_programs.MODEL)
    (folder / "main.cpp").write_text(split_programs.MAIN)
    return program_path, folder


@pytest.mark.parametrize("seed", [1, 2])
def test_the_trace_is_the_same_whatever_throws(tools: tuple[str, pathlib.Path], seed: int) -> None:
    """The same trace of calls, destructions and outputs, if nothing or any one call throws."""
    drawn = split_programs.Program(seed, 150)
    units = small(drawn.program, unit=50, function=10)
    assert len(units) >= 3
    traces = [trace(tools, [whole_text(drawn.program)]), trace(tools, units)]
    assert traces[0].count("\ndone\n") == 1
    assert traces[0].count("\nthrown ") > 40
    assert traces[0] == traces[1]


def trace(tools: tuple[str, pathlib.Path], units: Sequence[str]) -> str:
    compiler_path, folder = tools
    sources = [folder / f"unit{number}.cpp" for number in range(len(units))]
    for source, text in zip(sources, units, strict=True):
        source.write_text(text)
    output = str(folder / "program")
    flags = ["-std=c++20", "-O0", f"-I{folder}"]
    paths = [str(source) for source in (folder / "main.cpp", *sources)]
    subprocess.run([compiler_path, *flags, *paths, "-o", output], check=True)
    return subprocess.run([output], check=True, capture_output=True, text=True).stdout


class Mixed(torch.nn.Module):
    """Control flow, unbacked sizes, buffers and several outputs."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor, positive: torch.Tensor) -> dict[str, Any]:
        results = {}
        for number, layer in enumerate(self.layers):
            x = torch.nn.functional.gelu(layer(x)) + x.sum(-1, keepdim=True).softmax(0)
            results[f"layer{number}"] = x.t() @ x
        self.seen.add_(x.mean(0))
        x = torch.cond(positive, lambda y: y.sin() @ y.t(), lambda y: y.cos() @ y.t(), (x,))
        return {**results, "last": x, "large": (x > 0).nonzero(), "view": x.t()}


@pytest.mark.parametrize("arenas", ["never", "always"])
def test_an_artifact_of_many_units_computes_the_same_bytes(
    arenas: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled: list[str] = []
    real = compiler.Compiler.compile

    def spy(self: Any, units: Sequence[compiler.Unit], runtime: compiler.PrebuiltRuntime) -> None:
        compiled.extend(pathlib.Path(unit.source).name for unit in units)
        real(self, units, runtime)

    monkeypatch.setattr(compiler.Compiler, "compile", spy)
    torch.manual_seed(0)
    model = Mixed()
    args = torch.randn(6, 8), torch.tensor(True)
    shapes = {"x": {0: Dim("n", min=4, max=64)}, "positive": None}
    artifacts = [
        aot_util.compile_model(
            model, args, dynamic_shapes=shapes, aot_unit_size=size, memory_arenas=arenas
        )
        for size in (0, 12)
    ]
    assert sum(bool(re.fullmatch(r"wrapper\d+\.cpp", name)) for name in compiled) >= 4
    assert "aot_unit_size" not in caplog.text
    for size, positive in ((6, True), (4, False), (33, True)):
        inputs = torch.randn(size, 8), torch.tensor(positive)
        outputs = [artifact.check(*inputs) for artifact in artifacts]
        whole, parts = (list(output.values()) for output in outputs)
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_sections_of_a_program_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections cover the whole program, and a unit contains the launchers that it calls."""
    pytest.importorskip("triton")
    from inductor_ext.autotune import decide
    from inductor_ext.templates.triton.config import GemmConfig
    from test.support import fake_cuda

    programs: list[split_units.Program] = []
    real = split_units.Program.__init__

    def spy(self: split_units.Program, lines: Any) -> None:
        real(self, lines)
        programs.append(self)

    monkeypatch.setattr(split_units.Program, "__init__", spy)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.relu(x @ w.t())
        return x

    shapes = (("rows", 64), torch.bfloat16), ((64, 64), torch.bfloat16)
    with decide.force_config(lambda _: GemmConfig("persistent_tma", 64, 64, 64, 2, 4, tma=True)):
        code = fake_cuda.lower_cpp(function, *shapes, ahead=True)
    (whole,) = programs
    assert code.startswith(whole.text(*Section))
    (name,) = (mark.function for mark, _ in whole.sections if mark.section is Section.LAUNCHER)
    units = whole.units(8, function=4)
    assert "AOTICudaStreamGuard stream_guard(" in run_of(units)
    for unit in units[1:]:
        calls, launchers = unit.count(f"    {name}("), unit.count(f" void {name}(")
        assert launchers == (calls > 0)
        before = unit[: unit.index("class AOTInductorModelKernels ")]
        assert "namespace {" not in before
