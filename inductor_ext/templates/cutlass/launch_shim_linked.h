
#ifndef INDUCTOR_EXT_@SYMBOL@
#define INDUCTOR_EXT_@SYMBOL@
extern "C" {
int64_t @SYMBOL@_workspace_size(const inductor_ext_cutlass::Call*);
int32_t @SYMBOL@_run(const inductor_ext_cutlass::Call*, void*, void*);
}
[[maybe_unused]] static constexpr inductor_ext_cutlass::Kernel @SYMBOL@{
    "@NAME@", @SYMBOL@_workspace_size, @SYMBOL@_run};
#endif
