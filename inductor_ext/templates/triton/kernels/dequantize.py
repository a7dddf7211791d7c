"""Integer to float conversion in registers, for kernels with a quantized b.

Conversion instructions are slow and bit operations are not: an integer placed in the low mantissa
bits of 2^n, where the last bit of the mantissa counts 1, is the float 2^n + integer, from which 2^n
is subtracted (Kim et al. 2022, "Who Says Elephants Can't Run"). bfloat16 has 7 such bits, float16
has 10.

Two 4-bit integers in a byte are adjacent along K. Each makes a tile of its own, which is multiplied
by every other column of a. Kernels read a as words of two adjacent elements and split them the same
way, so no data moves between threads, which is what makes other methods slow.

`MACROS` goes at the head of a kernel's source. `convert(name)` replaces the tile `name` by one of
a's dtype, or by `name`_even and `name`_odd; `words(name)` converts a tile of 32-bit words, whose
bytes are adjacent along K, to such tiles; `shared(target, name, like, words)` loads the values that
groups along K share as a tile, from the pointer `name` with the strides of the argument `like`.
Tiles are [K, N]. Options that do not follow from the problem:

- ZERO: an integer from 0 to 100 that is subtracted from all of b;
- HIGH_FIRST: whether the upper half of a byte has the smaller k;
- WIDE: whether group zero points and scales are applied in float32 instead of a's dtype;
- SCALE_WORDS, ZERO_WORDS: how many values adjacent along K make a 32-bit word, if all words are
  aligned; else 1.
"""

from __future__ import annotations

from typing import Any

from inductor_ext.templates.problem import GemmProblem

MACROS = r"""
{%- set packed = DEQUANTIZE in ("'int4'", "'uint4'") %}
{%- set signed = DEQUANTIZE in ("'int8'", "'int4'") %}
{#- The upper byte of 128 or 1024, below which integers are placed. #}
{%- set exponent = "0x43434343" if HALF == "'bfloat16'" else "0x64646464" %}
{#- Place the lower and the upper two of four bytes below exponents. #}
{%- macro spread(low, high, source) -%}
prmt.b32 {{low}}, {{source}}, {{exponent}}, 0x4140;
{{- " " -}} prmt.b32 {{high}}, {{source}}, {{exponent}}, 0x4342;
{%- endmacro %}
{%- macro minus(target, number) -%}
{%- if HALF == "'bfloat16'" -%}
fma.rn.bf16x2 {{target}}, {{target}}, one, {{number}};
{%- else -%}
add.rn.f16x2 {{target}}, {{target}}, {{number}};
{%- endif -%}
{%- endmacro %}
{#- PTX that converts four bytes in `source` to pairs of values in `low` and `high`. #}
{%- macro of_bytes(low, high, source) -%}
{%- if HALF == "'bfloat16'" -%}
{#- 7 bits fit below the exponent: the eighth one increments the exponent, so the value is 128 + n
    for n up to 127 and 2 n above. There half of it minus 128 is subtracted. #}
"{ .reg .b32 t, p, q, one, half, less, most, offset; mov.b32 one, 0x3f803f80; "
            "mov.b32 half, 0x3f003f00; mov.b32 less, 0xbf80bf80; mov.b32 most, 0xc300c300; "
            "mov.b32 offset, {{"0xc380c380" if signed else "0xc300c300"}}; "
            "{{"xor.b32 t, %s, 0x80808080;" % source if signed else "mov.b32 t, %s;" % source}} "
            "{{spread(low, high, "t")}} "
            "fma.rn.relu.bf16x2 p, {{low}}, half, most; "
            "fma.rn.relu.bf16x2 q, {{high}}, half, most; "
            "{{minus(low, "offset")}} {{minus(high, "offset")}} "
            "fma.rn.bf16x2 {{low}}, p, less, {{low}}; fma.rn.bf16x2 {{high}}, q, less, {{high}}; }"
{%- else -%}
"{ .reg .b32 t, offset; mov.b32 offset, {{"0xe480e480" if signed else "0xe400e400"}}; "
            "{{"xor.b32 t, %s, 0x80808080;" % source if signed else "mov.b32 t, %s;" % source}} "
            "{{spread(low, high, "t")}} {{minus(low, "offset")}} {{minus(high, "offset")}} }"
{%- endif -%}
{%- endmacro %}
{#- The same for four bytes of two 4-bit integers: pairs of lower halves, then of upper ones. #}
{%- macro of_halves(pairs, source) -%}
{%- set offset = "0x%04x" % ((0xC300 if HALF == "'bfloat16'" else 0xE400) + bias) -%}
"{ .reg .b32 t, u, one, offset; mov.b32 one, 0x3f803f80; "
            "mov.b32 offset, {{offset}}{{offset[2:]}}; "
            "{{"xor.b32 u, %s, 0x88888888;" % source if signed else "mov.b32 u, %s;" % source}} "
            "and.b32 t, u, 0x0f0f0f0f; shr.u32 u, u, 4; and.b32 u, u, 0x0f0f0f0f; "
            "{{spread(pairs[0], pairs[1], "t")}} {{spread(pairs[2], pairs[3], "u")}} "
            {%- for pair in pairs %}
            "{{minus(pair, "offset")}} "
            {%- endfor %}
            "}"
{%- endmacro %}
{%- set bias = ZERO + (8 if signed else 0) %}
{%- set lower, upper = ("odd", "even") if HIGH_FIRST else ("even", "odd") %}
{#- Convert `name` to a's dtype; 4-bit integers to `name`_even and `name`_odd. #}
{%- macro convert(name) %}
    {%- if packed %}
    {%- set low = name ~ "_" ~ lower %}
    {%- set high = name ~ "_" ~ upper %}
    {%- if BITS %}
        {{low}}, {{high}} = tl.inline_asm_elementwise(
            {{of_halves(("$0", "$1", "$2", "$3"), "$4")}},
            "=&r,=&r,=&r,=&r,r", [{{name}}],
            dtype=(A.dtype.element_ty, A.dtype.element_ty), is_pure=True, pack=4,
        )
    {%- else %}
        {{low}} = {{name}} & 15
        {{high}} = ({{name}} >> 4) & 15
        {%- for half in (low, high) %}
        {%- if signed %}
        {{half}} = {{half}} ^ 8
        {%- endif %}
        {{half}} = {{half}}.to(A.dtype.element_ty) - {{bias}}.0
        {%- endfor %}
    {%- endif %}
    {%- set tiles = (low, high) %}
    {%- elif BITS and DEQUANTIZE in ("'int8'", "'uint8'") %}
        {{name}} = tl.inline_asm_elementwise(
            {{of_bytes("$0", "$1", "$2")}},
            "=&r,=&r,r", [{{name}}], dtype=A.dtype.element_ty, is_pure=True, pack=4,
        )
    {%- set tiles = (name,) %}
    {%- else %}
        {{name}} = {{name}}.to(A.dtype.element_ty)
    {%- set tiles = (name,) %}
    {%- endif %}
    {%- if ZERO and not packed %}
        {{name}} = {{name}} - {{ZERO}}.0
    {%- endif %}
    {%- for tile in tiles %}
    {%- if WIDE and SCALES == "'group'" %}
        {{tile}} = {{tile}}.to(tl.float32)
    {%- endif %}
    {%- if ZEROS %}
        {{tile}} = {{tile}} - zero
    {%- endif %}
    {%- if SCALES == "'group'" %}
        {{tile}} = ({{tile}} * scale).to(A.dtype.element_ty)
    {%- endif %}
    {%- endfor %}
{%- endmacro %}
{#- Convert words of four integers adjacent along K to `all_0` to `all_3`, or words of eight 4-bit
    integers to `even_0` to `even_3` and `odd_0` to `odd_3`: tiles of a's dtype. #}
{%- macro words(name) %}
    {%- set kinds = (lower, upper) if packed else ("all",) %}
    {%- set names = [] %}
    {%- for kind in kinds %}{% for i in range(4) %}{% set _ = names.append(kind ~ "_" ~ i) %}
    {%- endfor %}{% endfor %}
    {%- if BITS %}
        {{names | join(", ")}} = tl.inline_asm_elementwise(
            "{ .reg .b32 v, w, x, y; "
            {{of_halves(("v", "w", "x", "y"), "$8") if packed else of_bytes("v", "w", "$4")}}
            {%- for i in range(0, names | length, 2) %}
            "mov.b32 { ${{i}}, ${{i + 1}} }, {{"vwxy"[i // 2]}}; "
            {%- endfor %}
            "}",
            "{{"=&h," * (names | length)}}r", [{{name}}], is_pure=True, pack=1,
            dtype=({{(["A.dtype.element_ty"] * (names | length)) | join(", ")}}),
        )
    {%- else %}
    {%- for tile in names %}
    {%- set at = 8 * (loop.index0 % 4) + (4 if loop.index0 >= 4 else 0) %}
    {%- set bits = 4 if packed else 8 %}
    {%- if signed %}
        {{tile}} = (({{name}} << {{32 - bits - at}}) >> {{32 - bits}}).to(A.dtype.element_ty)
    {%- else %}
        {{tile}} = (({{name}} >> {{at}}) & {{2 ** bits - 1}}).to(A.dtype.element_ty)
    {%- endif %}
    {%- if ZERO and packed %}
        {{tile}} = {{tile}} - {{ZERO}}.0
    {%- endif %}
    {%- endfor %}
    {%- endif %}
    {%- if ZERO and not packed %}
    {%- for tile in names %}
        {{tile}} = {{tile}} - {{ZERO}}.0
    {%- endfor %}
    {%- endif %}
{%- endmacro %}
{#- A tile as large as that of b, of rows that each repeat the values of a group. Asynchronous
    copies, without which every step would wait for memory, have 32 bits or more, so a word may hold
    the values of several groups. Each thread then loads one word, even if several rows belong to
    the same group: with fewer rows Triton 3.6 and 3.7 do not load them in the layout of the tensor
    cores, and b would pass through shared memory. #}
{%- macro shared(target, name, like, words) %}
    {%- set rows = BLOCK_K // GROUP if BLOCK_K > GROUP else 1 %}
    {%- set in_words = words > rows %}
    {%- set rows = [rows, THREADS // COLUMNS] | max if in_words else rows %}
    {%- set deep = BLOCK_K // 2 if packed else BLOCK_K %}
    {%- set checks = [] if EVEN_N else ["(rn[None, :] < N)"] %}
    {%- if not EVEN_K %}{% set _ = checks.append("(rg[:, None] * GROUP < K)") %}{% endif %}
    {%- set mask = ", mask=%s, other=0" % " & ".join(checks) if checks else "" %}
    {%- if in_words %}
    {%- set bits = 32 // words %}
        rg = (k + tl.arange(0, {{rows}}) * {{BLOCK_K // rows}}) // GROUP
        at = {{name}}.to(tl.pointer_type(tl.int32)) + rg[:, None] // {{words}}
        at += rn[None, :] * ({{stride(like, 1)}} // {{words}})
        {{target}} = tl.load(at{{mask}})
        {{target}} = ({{target}} >> (rg[:, None] % {{words}} * {{bits}})).to(tl.int{{bits}})
        {{target}} = {{target}}.to({{name}}.dtype.element_ty, bitcast=True)
    {%- else %}
        rg = k // GROUP + tl.arange(0, {{rows}})
        at = {{name}} + rg[:, None] * {{stride(like, 0)}} + rn[None, :] * {{stride(like, 1)}}
        {{target}} = tl.load(at{{mask}})
    {%- endif %}
        {{target}} = {{target}}.to({{"tl.float32" if WIDE else "A.dtype.element_ty"}})
        {{target}} = tl.broadcast_to({{target}}[:, None, :], ({{rows}}, {{deep // rows}}, COLUMNS))
        {{target}} = tl.reshape({{target}}, ({{deep}}, COLUMNS))
{%- endmacro %}
"""


def constants(problem: GemmProblem) -> dict[str, Any]:
    """Return the macros' constants for a problem, with default options."""
    dequant = problem.dequant
    return {
        "DEQUANTIZE": repr(problem.b.dtype if problem.operation == "mixed" else ""),
        "HALF": repr(problem.a.dtype),
        "GROUP": dequant.group if dequant is not None else 0,
        "ZEROS": dequant is not None and dequant.zero_points,
        "ZERO": 0,
        "HIGH_FIRST": False,
        "WIDE": False,
        "SCALE_WORDS": 1,
        "ZERO_WORDS": 1,
        # Whether to use PTX instructions, which the interpreter does not support.
        "BITS": True,
    }
