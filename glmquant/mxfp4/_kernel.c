// BF16, F16 or F32 -> packed E2M1 + E8M0 in one pass over the source. kernel.py has the contract, the table of
// thresholds and the reasons; this file only does what that table says, 32 elements (one block) at a time.
// And block-scaled E4M3 -> BF16, as checkpoint/fp8.py defines it.
//
// No intrinsics: the loops have fixed trip counts and 16-bit lanes, so compilers vectorise them at -O3, and the same
// source is compiled once per instruction set and picked at run time. Indices are Py_ssize_t: Python is often built with
// -fwrapv, which extensions inherit, and with it gcc does not vectorise loops over int (13 times slower).
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "safetensors data is little-endian: this machine takes the numpy path"
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

enum { BLOCK = 32, STRIP = 8 * BLOCK, ROW = 8, ROWS = 256 };
enum { BF16, F16, F32, DTYPES };
enum { NON_FINITE = 0x7f00 }; // keys of Inf and NaN begin here

// A key is the magnitude's float32 bits without the last 15, which only leave a trace in the lowest bit that is kept,
// with the top bit flipped: 16 bits that compare, as signed numbers, like the magnitudes. SSE2 has only signed ones.
INLINE int16_t key_of(uint32_t magnitude) {
  return (int16_t)((uint16_t)(magnitude >> 15 | ((magnitude & 0x7fff) != 0)) ^ 0x8000);
}

INLINE uint32_t widen_f16(uint32_t magnitude) {
  // Subnormals: put the bits below 2^-14 and subtract it. No subnormal float32 appears, so flush modes cannot matter.
  uint32_t bits = (magnitude << 13) + (113u << 23), subnormal;
  float f;
  memcpy(&f, &bits, 4);
  f -= 0x1p-14f;
  memcpy(&subnormal, &f, 4);
  return magnitude < 0x0400 ? subnormal : magnitude < 0x7c00 ? bits - (1u << 23) : 0x7fffffff;
}

INLINE void load(int dtype, const uint8_t *__restrict source, Py_ssize_t count, int16_t *__restrict key,
                 uint16_t *__restrict sign) {
  for (Py_ssize_t i = 0; i < count; i++) {
    if (dtype == F32) {
      uint32_t bits;
      memcpy(&bits, source + 4 * i, 4); // the source may begin at any byte
      key[i] = key_of(bits & 0x7fffffff);
      sign[i] = (uint16_t)(bits >> 28 & 8);
    } else {
      uint16_t bits;
      memcpy(&bits, source + 2 * i, 2);
      key[i] = dtype == BF16 ? (int16_t)((uint16_t)(bits << 1) ^ 0x8000) : key_of(widen_f16(bits & 0x7fff));
      sign[i] = bits >> 12 & 8;
    }
  }
}

INLINE Py_ssize_t quantize(int dtype, const uint8_t *__restrict source, Py_ssize_t count, uint8_t *__restrict packed,
                           uint8_t *__restrict scale, const int16_t *__restrict table) {
  int16_t key[STRIP];
  uint16_t sign[STRIP], code[STRIP];
  for (Py_ssize_t done = 0; done < count; done += STRIP) {
    // A strip of a few blocks passes each stage as a whole: wide loads right behind narrower stores would stall.
    Py_ssize_t strip = count - done < STRIP ? count - done : STRIP;
    load(dtype, source + done * (dtype == F32 ? 4 : 2), strip, key, sign);
    for (Py_ssize_t start = 0; start < strip; start += BLOCK) {
      const int16_t *k = key + start;
      int16_t top = INT16_MIN;
      for (Py_ssize_t i = 0; i < BLOCK; i++) top = k[i] > top ? k[i] : top;
      if (top >= NON_FINITE) {
        int i = 0;
        while (k[i] < NON_FINITE) i++;
        return done + start + i;
      }
      // The row of the block's exponent. From mantissa 1.75 on, 0x40 carries into the next one.
      const int16_t *t = table + ROW * ((top + 0x8000 + 0x40) >> 8);
      const int16_t t0 = t[0], t1 = t[1], t2 = t[2], t3 = t[3], t4 = t[4], t5 = t[5], t6 = t[6];
      for (Py_ssize_t i = 0; i < BLOCK; i++) {
        int16_t m = k[i];
        uint16_t s = sign[start + i];
        int n = (m > t0) + (m > t1) + (m > t2) + (m > t3) + (m > t4) + (m > t5) + (m > t6);
        code[start + i] = (uint16_t)(n | (m > t0 ? s : 0)); // what rounds to zero is +0
      }
      scale[(done + start) / BLOCK] = (uint8_t)t[7];
    }
    for (Py_ssize_t i = 0; i < strip / 2; i++) packed[done / 2 + i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
  }
  return -1;
}

// float32 bits of an E4M3 code (OCP 8-bit floating point specification, section 5.1: bias 7, no Inf) times a scale.
INLINE uint32_t scaled(uint32_t code, float scale) {
  // Subnormals: put the bits below 2^-6 and subtract it, as in widen_f16. Masks, since a choice would become a branch
  // around the subtraction, with which gcc does not vectorise the loop.
  int32_t magnitude = (int32_t)(code & 0x7f), bits = (magnitude << 20) + (121 << 23), subnormal;
  float f;
  memcpy(&f, &bits, 4);
  f -= 0x1p-6f;
  memcpy(&subnormal, &f, 4);
  int32_t small = -(magnitude < 0x08), nan = -(magnitude == 0x7f) & 0x7fc00000;
  uint32_t product = (uint32_t)((subnormal & small) | ((bits - (1 << 23)) & ~small) | nan) | (code & 0x80) << 24;
  memcpy(&f, &product, 4);
  f *= scale;
  memcpy(&product, &f, 4);
  return product;
}

enum { TO_INF = 0x7f7f8000 }; // magnitudes from here on are Inf or NaN in BF16

// Elements of one row that share a scale; the index of the first that is not finite, or -1.
INLINE Py_ssize_t dequantize(const uint8_t *__restrict codes, Py_ssize_t count, float scale, uint8_t *__restrict out) {
  int32_t top = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    uint32_t bits = scaled(codes[i], scale);
    int32_t magnitude = (int32_t)(bits & 0x7fffffff);
    uint16_t rounded = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); // ties to even
    top = magnitude > top ? magnitude : top;
    memcpy(out + 2 * i, &rounded, 2);
  }
  if (top < TO_INF) return -1;
  Py_ssize_t i = 0;
  while ((scaled(codes[i], scale) & 0x7fffffff) < TO_INF) i++;
  return i;
}

struct blocks { Py_ssize_t rows, columns; };

// Whole rows; `scale` are those of the whole weight, in which the first row has number `first`.
INLINE Py_ssize_t dequantize_rows(const uint8_t *codes, Py_ssize_t rows, Py_ssize_t columns, const uint8_t *scale,
                                  Py_ssize_t first, struct blocks block, uint8_t *out) {
  Py_ssize_t across = (columns + block.columns - 1) / block.columns, found = -1;
  for (Py_ssize_t row = 0; row < rows; row++) {
    const uint8_t *line = scale + 4 * across * ((first + row) / block.rows);
    for (Py_ssize_t begin = 0; begin < columns; begin += block.columns) {
      Py_ssize_t count = columns - begin < block.columns ? columns - begin : block.columns, at = row * columns + begin;
      float s;
      memcpy(&s, line + 4 * (begin / block.columns), 4);
      Py_ssize_t bad = dequantize(codes + at, count, s, out + 2 * at);
      if (bad >= 0 && found < 0) found = at + bad;
    }
  }
  return found;
}

typedef Py_ssize_t kernel(int, const uint8_t *, Py_ssize_t, uint8_t *, uint8_t *, const int16_t *);
typedef Py_ssize_t fp8_kernel(const uint8_t *, Py_ssize_t, Py_ssize_t, const uint8_t *, Py_ssize_t, struct blocks,
                              uint8_t *);

#define COMPILE_FOR(name, target)                                                                                      \
  target static Py_ssize_t name(int dtype, const uint8_t *source, Py_ssize_t count, uint8_t *packed, uint8_t *scale,   \
                                const int16_t *table) {                                                                \
    switch (dtype) {                                                                                                   \
    case BF16: return quantize(BF16, source, count, packed, scale, table);                                             \
    case F16: return quantize(F16, source, count, packed, scale, table);                                               \
    default: return quantize(F32, source, count, packed, scale, table);                                                \
    }                                                                                                                  \
  }                                                                                                                    \
  target static Py_ssize_t name##_fp8(const uint8_t *codes, Py_ssize_t rows, Py_ssize_t columns, const uint8_t *scale, \
                                      Py_ssize_t first, struct blocks block, uint8_t *out) {                           \
    return dequantize_rows(codes, rows, columns, scale, first, block, out);                                            \
  }

COMPILE_FOR(any_cpu, )
#if defined(__GNUC__) && (defined(__x86_64__) || defined(__i386__))
#define X86
COMPILE_FOR(avx2, __attribute__((target("avx2"))))
COMPILE_FOR(avx512, __attribute__((target("avx512f,avx512bw,avx512vl"))))
#endif

static const struct level { const char *name; kernel *run; fp8_kernel *run_fp8; } LEVELS[] = {
#ifdef X86
    {"avx512", avx512, avx512_fp8},
    {"avx2", avx2, avx2_fp8},
#endif
    {"c", any_cpu, any_cpu_fp8},
};
enum { LEVEL_COUNT = sizeof LEVELS / sizeof *LEVELS };

static int runs_here(const struct level *level) {
#ifdef X86
  __builtin_cpu_init();
  if (level->run == avx512) return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (level->run == avx2) return __builtin_cpu_supports("avx2");
#endif
  return level->run == any_cpu;
}

static PyObject *py_available(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  PyObject *names = PyList_New(0);
  for (int i = 0; names && i < LEVEL_COUNT; i++) {
    if (!runs_here(&LEVELS[i])) continue;
    PyObject *name = PyUnicode_FromString(LEVELS[i].name);
    if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

static PyObject *py_quantize(PyObject *self, PyObject *args) {
  (void)self;
  const char *name;
  int dtype;
  Py_buffer source, packed, scale, table;
  if (!PyArg_ParseTuple(args, "siy*w*w*y*", &name, &dtype, &source, &packed, &scale, &table)) return NULL;
  const struct level *level = NULL;
  for (int i = 0; i < LEVEL_COUNT; i++)
    if (!strcmp(LEVELS[i].name, name) && runs_here(&LEVELS[i])) level = &LEVELS[i];
  Py_ssize_t found = -1, count = source.len / (dtype == F32 ? 4 : 2);
  // kernel.py has checked all this and says what is wrong; here it guards the memory.
  int fits = level && dtype >= 0 && dtype < DTYPES && count % BLOCK == 0 && packed.len == count / 2 &&
             scale.len == count / BLOCK && table.len == ROWS * ROW * (Py_ssize_t)sizeof(int16_t);
  if (fits) {
    Py_BEGIN_ALLOW_THREADS
    found = level->run(dtype, source.buf, count, packed.buf, scale.buf, table.buf);
    Py_END_ALLOW_THREADS
  }
  PyBuffer_Release(&source), PyBuffer_Release(&packed), PyBuffer_Release(&scale), PyBuffer_Release(&table);
  if (!fits) return PyErr_Format(PyExc_ValueError, "level, dtype and buffers do not belong together");
  return PyLong_FromSsize_t(found);
}

static PyObject *py_dequantize(PyObject *self, PyObject *args) {
  (void)self;
  const char *name;
  Py_buffer codes, scale, out;
  Py_ssize_t columns, first;
  struct blocks block;
  if (!PyArg_ParseTuple(args, "sy*ny*nnnw*", &name, &codes, &columns, &scale, &first, &block.rows, &block.columns, &out))
    return NULL;
  const struct level *level = NULL;
  for (int i = 0; i < LEVEL_COUNT; i++)
    if (!strcmp(LEVELS[i].name, name) && runs_here(&LEVELS[i])) level = &LEVELS[i];
  Py_ssize_t found = -1;
  // As above. Sizes first, so that nothing below divides by zero or overflows: lengths are far below PY_SSIZE_T_MAX / 4.
  int fits = level && columns > 0 && block.rows > 0 && block.columns > 0 && block.columns <= PY_SSIZE_T_MAX / 2 &&
             first >= 0 && first <= PY_SSIZE_T_MAX / 2 && codes.len % columns == 0 && out.len / 2 == codes.len &&
             out.len % 2 == 0;
  if (fits) {
    Py_ssize_t rows = codes.len / columns, across = (columns + block.columns - 1) / block.columns;
    fits = rows && across <= scale.len / 4 && scale.len / 4 / across > (first + rows - 1) / block.rows;
    if (fits) {
      Py_BEGIN_ALLOW_THREADS
      found = level->run_fp8(codes.buf, rows, columns, scale.buf, first, block, out.buf);
      Py_END_ALLOW_THREADS
    }
  }
  PyBuffer_Release(&codes), PyBuffer_Release(&scale), PyBuffer_Release(&out);
  if (!fits) return PyErr_Format(PyExc_ValueError, "level, sizes and buffers do not belong together");
  return PyLong_FromSsize_t(found);
}

static PyMethodDef METHODS[] = {
    {"dequantize", py_dequantize, METH_VARARGS,
     "dequantize(level, codes, columns, scale, first row, block rows, block columns, out) -> first bad, or -1"},
    {"available", py_available, METH_NOARGS, "Names of the levels that this CPU runs, best first."},
    {"quantize", py_quantize, METH_VARARGS, "quantize(level, dtype, source, packed, scale, table) -> first bad, or -1"},
    {0},
};

static PyModuleDef_Slot SLOTS[] = {
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, // no state
#endif
    {0},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "_kernel", .m_methods = METHODS, .m_slots = SLOTS};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&MODULE); }
