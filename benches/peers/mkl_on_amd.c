/* Has PyTorch's MKL take its AVX-512 kernels on an AMD processor as it does on Intel's: it asks this before it looks at what the
 * processor has. Makes f32 products about twice as fast there (Zen 5), and so a fairer peer.
 *
 *     cc -shared -fPIC -o mkl_on_amd.so benches/peers/mkl_on_amd.c
 *     LD_PRELOAD=$PWD/mkl_on_amd.so /tmp/peers/bin/python benches/peers/pytorch_step.py --model baby-gpt
 *
 * The compare scripts build and preload it for PyTorch alone with --mkl-as-on-intel.
 */
int mkl_serv_intel_cpu_true(void) { return 1; }
