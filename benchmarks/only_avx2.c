/* Preloaded by only_avx2.py: CPUID tells this process of nothing after AVX2.

Linux can make CPUID fault (arch_prctl ARCH_SET_CPUID, where /proc/cpuinfo has cpuid_fault); threads inherit that, and
exec ends it. The handler answers in its place. What the features are: Intel 64 manual, volume 2, CPUID. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { SET_CPUID = 0x1012, FAULTS = 0, WORKS = 1 };

/* Of leaf 7: AVX-512 of every kind, tiles; of its subleaf 1: AVX-VNNI, AVX-IFMA, AVX-NE-CONVERT, bfloat16, more tiles, AVX10. */
static const uint32_t EBX_7 = 1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31;
static const uint32_t ECX_7 = 1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14;
static const uint32_t EDX_7 = 1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25;
static const uint32_t EAX_7_1 = 1u << 4 | 1u << 5 | 1u << 21 | 1u << 23;
static const uint32_t EDX_7_1 = 1u << 4 | 1u << 5 | 1u << 8 | 1u << 10 | 1u << 19;

static void cpuid(uint32_t leaf, uint32_t subleaf, uint32_t to[4]) {
  __asm__ volatile("cpuid" : "=a"(to[0]), "=b"(to[1]), "=c"(to[2]), "=d"(to[3]) : "a"(leaf), "c"(subleaf));
}

static void answer(int signal_number, siginfo_t *info, void *context) {
  (void)info;
  greg_t *at = ((ucontext_t *)context)->uc_mcontext.gregs;
  const uint8_t *code = (const uint8_t *)at[REG_RIP];
  if (code[0] != 0x0F || code[1] != 0xA2) { /* another fault: let it happen again, with nobody to answer */
    signal(signal_number, SIG_DFL);
    return;
  }
  const uint32_t leaf = (uint32_t)at[REG_RAX], subleaf = (uint32_t)at[REG_RCX];
  uint32_t is[4];
  syscall(SYS_arch_prctl, SET_CPUID, WORKS);
  cpuid(leaf, subleaf, is);
  syscall(SYS_arch_prctl, SET_CPUID, FAULTS);
  if (leaf == 7 && subleaf == 0) is[1] &= ~EBX_7, is[2] &= ~ECX_7, is[3] &= ~EDX_7;
  if (leaf == 7 && subleaf == 1) is[0] &= ~EAX_7_1, is[3] &= ~EDX_7_1;
  at[REG_RAX] = is[0], at[REG_RBX] = is[1], at[REG_RCX] = is[2], at[REG_RDX] = is[3];
  at[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
  struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
  static const char failed[] = "only_avx2: this system cannot make CPUID fault (no cpuid_fault in /proc/cpuinfo)\n";
  if (!sigaction(SIGSEGV, &action, NULL) && !syscall(SYS_arch_prctl, SET_CPUID, FAULTS)) return;
  (void)!write(2, failed, sizeof failed - 1);
  _exit(1);
}
