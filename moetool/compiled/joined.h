// Vectors of 16 numbers where the processor has vectors of 8: two of these beside each other. As vectors of 16 in the
// compiler's own terms they would go through memory with every operation, as GCC does it.
#pragma once

template <class E> struct Joined {
  typedef E Part __attribute__((vector_size(32)));
  typedef Joined<int32_t> Mask;
  Part low, high;

  Joined() = default;
  Joined(Part first, Part second) : low(first), high(second) {}
  template <class O> explicit Joined(Joined<O> other) : low((Part)other.low), high((Part)other.high) {}  // the same bits
  E& operator[](long i) { return ((E*)this)[i]; }
  E operator[](long i) const { return i < 8 ? low[i] : high[i - 8]; }
#define OPERATOR(op) \
  friend Joined operator op(Joined a, Joined b) { return Joined(a.low op b.low, a.high op b.high); } \
  friend Joined operator op(Joined a, E b) { return Joined(a.low op b, a.high op b); } \
  friend Joined operator op(E a, Joined b) { return Joined(a op b.low, a op b.high); } \
  template <class O> Joined& operator op##=(O b) { return *this = *this op b; }
#define COMPARISON(op) \
  friend Mask operator op(Joined a, Joined b) { return Mask(a.low op b.low, a.high op b.high); } \
  friend Mask operator op(Joined a, E b) { return Mask(a.low op b, a.high op b); }
  OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(&) OPERATOR(|) OPERATOR(^) OPERATOR(<<) OPERATOR(>>)
  COMPARISON(<) COMPARISON(>) COMPARISON(==)
#undef OPERATOR
#undef COMPARISON
  friend Joined operator-(Joined a) { return Joined(-a.low, -a.high); }
};
typedef Joined<float> vf;
typedef Joined<int32_t> vi;
typedef Joined<uint32_t> vu;

static inline vf to_float(vi v) {
  return vf(__builtin_convertvector(v.low, vf::Part), __builtin_convertvector(v.high, vf::Part));
}
static inline vi to_int(vf v) {
  return vi(__builtin_convertvector(v.low, vi::Part), __builtin_convertvector(v.high, vi::Part));
}
template <class V> static inline V choose(vi mask, V yes, V no) {
  return V(mask.low ? yes.low : no.low, mask.high ? yes.high : no.high);
}
