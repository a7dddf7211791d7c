def inductor_ext(gm, example_inputs, *, mode=None, options=None):
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, config_patches=options)
