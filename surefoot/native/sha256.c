/* SHA-256 (FIPS 180-4) of up to 16 messages at once, one in each 32-bit lane of a vector: AVX-512 (16 lanes) or AVX2 (8).
 *
 * One message alone is a chain of dependent additions; side by side they fill the vector units. lanes.py calls this, hashes
 * nothing here that hashlib would not, and compares the first answer with it. This file includes itself once for each width.
 */
#ifndef LANES

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOST 16

typedef uint32_t state_t[8];

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) /* __builtin_shuffle is GCC's */

#include <cpuid.h>

#define ROTATE_LEFT(x, n) (((x) << (n)) | ((x) >> (32 - (n))))

typedef uint32_t vector_16 __attribute__((vector_size(64)));
typedef uint32_t vector_8 __attribute__((vector_size(32)));

#define LANES 16
#define LOG_LANES 4
#define VECTOR vector_16
#define RUN run_16
#define TARGET __attribute__((target("avx512f")))
#define LOW (vector_16){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}
#define HIGH (vector_16){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}
#include "sha256.c"

#define LANES 8
#define LOG_LANES 3
#define VECTOR vector_8
#define RUN run_8
#define TARGET __attribute__((target("avx2")))
#define LOW (vector_8){0, 8, 1, 9, 2, 10, 3, 11}
#define HIGH (vector_8){4, 12, 5, 13, 6, 14, 7, 15}
#include "sha256.c"

/* How many messages this processor takes at once; 0 where one at a time is as fast, since it has instructions for SHA-256. */
int num_lanes(void)
{
    unsigned a, b, c, d;
    __builtin_cpu_init();
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1))
        return 0;
    return __builtin_cpu_supports("avx512f") ? 16 : __builtin_cpu_supports("avx2") ? 8 : 0;
}

static void run(int width, uint32_t *const *states, const uint8_t **data, size_t blocks)
{
    if (width == 16)
        run_16(states, data, blocks);
    else
        run_8(states, data, blocks);
}

#else

int num_lanes(void) { return 0; }

static void run(int width, uint32_t *const *states, const uint8_t **data, size_t blocks) {}

#endif

/* Takes blocks[i] blocks of 64 bytes from data[i] into states[i], for each of `num` <= `width` messages. */
void update(int width, int num, state_t *states, const uint8_t *const *data, const size_t *blocks)
{
    size_t done[MOST] = {0};
    for (;;) {
        int active[MOST], num_active = 0;
        size_t step = SIZE_MAX;
        for (int i = 0; i < num; i++)
            if (done[i] < blocks[i]) {
                active[num_active++] = i;
                if (blocks[i] - done[i] < step)
                    step = blocks[i] - done[i];
            }
        if (!num_active)
            return;
        state_t idle; /* lanes without a message read another's, to no effect */
        uint32_t *into[MOST];
        const uint8_t *from[MOST];
        memset(idle, 0, sizeof idle);
        for (int lane = 0; lane < width; lane++) {
            int i = active[lane < num_active ? lane : 0];
            into[lane] = lane < num_active ? states[i] : idle;
            from[lane] = data[i] + 64 * done[i];
        }
        run(width, into, from, step);
        for (int lane = 0; lane < num_active; lane++)
            done[active[lane]] += step;
    }
}

#else /* what follows is compiled for each width */

TARGET static void RUN(uint32_t *const *states, const uint8_t **data, size_t blocks)
{
    VECTOR s[8], w[16];
    for (int i = 0; i < 8; i++)
        for (int lane = 0; lane < LANES; lane++)
            s[i][lane] = states[lane][i];
    for (; blocks; blocks--) {
        for (int part = 0; part < 16; part += LANES) { /* word i of every message into w[i]: a transposition, by shuffles */
            VECTOR m[LANES], n[LANES];
            for (int lane = 0; lane < LANES; lane++)
                memcpy(&m[lane], data[lane] + 4 * part, sizeof(VECTOR));
            for (int round = 0; round < LOG_LANES; round++) {
                for (int i = 0; i < LANES / 2; i++) {
                    n[2 * i] = __builtin_shuffle(m[i], m[i + LANES / 2], LOW);
                    n[2 * i + 1] = __builtin_shuffle(m[i], m[i + LANES / 2], HIGH);
                }
                memcpy(m, n, sizeof m);
            }
            for (int i = 0; i < LANES; i++) /* big-endian */
                w[part + i] = (ROTATE_LEFT(m[i], 8) & 0x00ff00ff) | (ROTATE_LEFT(m[i], 24) & 0xff00ff00);
        }
        for (int lane = 0; lane < LANES; lane++)
            data[lane] += 64;
        VECTOR a = s[0], b = s[1], c = s[2], d = s[3], e = s[4], f = s[5], g = s[6], h = s[7];
#pragma GCC unroll 64
        for (int i = 0; i < 64; i++) {
            VECTOR word = w[i & 15];
            VECTOR big_1 = ROTATE_LEFT(e, 26) ^ ROTATE_LEFT(e, 21) ^ ROTATE_LEFT(e, 7);
            VECTOR big_0 = ROTATE_LEFT(a, 30) ^ ROTATE_LEFT(a, 19) ^ ROTATE_LEFT(a, 10);
            VECTOR first = h + big_1 + ((e & f) ^ (~e & g)) + (word + K[i]);
            VECTOR second = big_0 + ((a & b) | (c & (a | b)));
            h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
            if (i < 48) {
                VECTOR x = w[(i + 1) & 15], y = w[(i + 14) & 15];
                VECTOR small_0 = ROTATE_LEFT(x, 25) ^ ROTATE_LEFT(x, 14) ^ (x >> 3);
                VECTOR small_1 = ROTATE_LEFT(y, 15) ^ ROTATE_LEFT(y, 13) ^ (y >> 10);
                w[i & 15] = word + w[(i + 9) & 15] + small_0 + small_1;
            }
        }
        s[0] += a, s[1] += b, s[2] += c, s[3] += d, s[4] += e, s[5] += f, s[6] += g, s[7] += h;
    }
    for (int i = 0; i < 8; i++)
        for (int lane = 0; lane < LANES; lane++)
            states[lane][i] = s[i][lane];
}

#undef LANES
#undef LOG_LANES
#undef VECTOR
#undef RUN
#undef TARGET
#undef LOW
#undef HIGH

#endif
