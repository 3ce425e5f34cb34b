//! Elements that are hard on codecs, predictors and kernels, for tests and self-tests.
//!
//! Every pattern depends only on the kind of element and its position, so it is the same on every
//! machine.

use crate::Width;

/// The type of a pattern's elements: integers, or floats with a given number of exponent bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// Width of an element.
    pub width: Width,
    /// Bits of exponent, below the sign; 0 for integers. The rest is mantissa.
    pub exponent_bits: u32,
}

impl Kind {
    /// 8-bit float with 4 exponent bits.
    pub const F8_E4M3: Self = Self::float(Width::B1, 4);
    /// 8-bit float with 5 exponent bits.
    pub const F8_E5M2: Self = Self::float(Width::B1, 5);
    /// The top half of [`Kind::F32`].
    pub const BF16: Self = Self::float(Width::B2, 8);
    /// IEEE 754 half precision.
    pub const F16: Self = Self::float(Width::B2, 5);
    /// IEEE 754 single precision.
    pub const F32: Self = Self::float(Width::B4, 8);
    /// IEEE 754 double precision.
    pub const F64: Self = Self::float(Width::B8, 11);
    /// Every kind of float.
    pub const FLOATS: [Self; 6] =
        [Self::F8_E4M3, Self::F8_E5M2, Self::BF16, Self::F16, Self::F32, Self::F64];

    /// A kind of float.
    pub const fn float(width: Width, exponent_bits: u32) -> Self {
        Self { width, exponent_bits }
    }

    /// Integers; also used for complex and unknown types.
    pub const fn int(width: Width) -> Self {
        Self { width, exponent_bits: 0 }
    }

    fn sign(self) -> u128 {
        1 << (self.width.bits() - 1)
    }

    fn mantissa_bits(self) -> u32 {
        self.width.bits() - 1 - self.exponent_bits
    }

    fn mantissa(self) -> u128 {
        (1 << self.mantissa_bits()) - 1
    }

    /// All bits of the exponent: infinity.
    fn exponent(self) -> u128 {
        (self.sign() - 1) & !self.mantissa()
    }
}

/// The bits of a pattern's element at a position; only as many low bits as the kind has count.
type Pattern = fn(Kind, u64) -> u128;

const OF_EVERY_KIND: &[(&str, Pattern)] = &[
    ("zeros", |_, _| 0),
    ("all-bits", |_, _| u128::MAX),
    ("all-equal", |k, _| random(k.width.bytes() as u64, 0)),
    ("counting", |_, i| u128::from(i)),
    ("counting-down", |_, i| u128::from(i).wrapping_neg()),
    ("alternating-bits", |_, i| if i % 2 == 0 { u128::MAX / 3 } else { u128::MAX / 3 * 2 }),
    ("alternating-signs", |k, i| if i % 2 == 0 { k.sign() - 1 } else { k.sign() }),
    ("one-bit", |k, i| 1 << (i % u64::from(k.width.bits()))),
    ("all-but-one-bit", |k, i| !(1 << (i % u64::from(k.width.bits())))),
    ("sparse", |_, i| if random(1, i).is_multiple_of(61) { random(2, i) } else { 0 }),
    ("two-values", |_, i| random(3, random(4, i) as u64 % 2)),
    ("runs", |_, i| random(5, i / 100)),
    ("random", |_, i| random(6, i)),
];

const OF_FLOATS: &[(&str, Pattern)] = &[
    ("signed-zeros", |k, i| signed(k, i, 0)),
    ("infinities", |k, i| signed(k, i, k.exponent())),
    ("nans", |k, i| signed(k, i, k.exponent() | nonzero(random(7, i) & k.mantissa()))),
    ("nan-payloads", |k, i| signed(k, i, k.exponent() | nonzero(u128::from(i / 2) & k.mantissa()))),
    ("subnormals", |k, i| signed(k, i, nonzero(random(8, i) & k.mantissa()))),
    ("every-exponent", |k, i| {
        let exponent = (u128::from(i) << k.mantissa_bits()) & k.exponent();
        signed(k, i, exponent | random(9, i) & k.mantissa())
    }),
    ("around-powers", |k, i| {
        let power = u128::from(i / 3) << k.mantissa_bits();
        power.wrapping_add(u128::from(i % 3)).wrapping_sub(1)
    }),
    ("like-weights", weight),
    ("like-squares", |k, i| weight(k, i) & !k.sign()),
    ("weights-and-nans", |k, i| {
        if random(10, i).is_multiple_of(97) { k.exponent() | 1 } else { weight(k, i) }
    }),
];

/// Every pattern of a kind, as (name, `n` little-endian elements).
pub fn all(kind: Kind, n: usize) -> impl Iterator<Item = (&'static str, Vec<u8>)> {
    let floats = if kind.exponent_bits > 0 { OF_FLOATS } else { &[] };
    OF_EVERY_KIND.iter().chain(floats).map(move |(name, pattern)| {
        let mut bytes = Vec::with_capacity(n * kind.width.bytes());
        for i in 0..n as u64 {
            bytes.extend_from_slice(&pattern(kind, i).to_le_bytes()[..kind.width.bytes()]);
        }
        (*name, bytes)
    })
}

/// Exponents fall off as those of trained weights do: half of the values have the largest one, half
/// of the others the next, ...; signs and mantissas are noise.
fn weight(kind: Kind, i: u64) -> u128 {
    let noise = random(11, i);
    let largest = (kind.exponent() >> kind.mantissa_bits()) / 2 - 1;
    let below = u128::from((noise >> 64).trailing_zeros()).min(largest);
    (largest - below) << kind.mantissa_bits() | noise & (kind.mantissa() | kind.sign())
}

/// The value with the sign bit set at random.
fn signed(kind: Kind, i: u64, value: u128) -> u128 {
    if random(12, i).is_multiple_of(2) { value } else { value | kind.sign() }
}

fn nonzero(x: u128) -> u128 {
    x.max(1)
}

/// Random bits that depend on the position only: two outputs of SplitMix64 (Steele, Lea and Flood,
/// "Fast splittable pseudorandom number generators", 2014).
fn random(seed: u64, i: u64) -> u128 {
    let state = seed << 56 ^ i << 1;
    u128::from(split_mix(state + 1)) << 64 | u128::from(split_mix(state))
}

fn split_mix(state: u64) -> u64 {
    let z = state.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(name: &str) -> Vec<f32> {
        let (_, bytes) = all(Kind::F32, 1000).find(|(n, _)| *n == name).unwrap();
        bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    #[test]
    fn float_patterns_are_what_they_are_called() {
        assert!(f32s("nans").iter().all(|x| x.is_nan()));
        assert!(f32s("nan-payloads").iter().all(|x| x.is_nan()));
        assert!(f32s("infinities").iter().all(|x| x.is_infinite()));
        assert!(f32s("subnormals").iter().all(|x| x.is_subnormal()));
        assert!(f32s("signed-zeros").iter().all(|x| *x == 0.0));
        assert!(f32s("like-weights").iter().all(|x| x.abs() < 1.0 && *x != 0.0));
        for name in ["nans", "infinities", "subnormals", "signed-zeros", "like-weights"] {
            let negative = f32s(name).iter().filter(|x| x.is_sign_negative()).count();
            assert!((400..600).contains(&negative), "{name}: {negative} of 1000 are negative");
        }
        let mut exponents: Vec<u32> =
            f32s("every-exponent").iter().map(|x| x.to_bits() << 1 >> 24).collect();
        exponents.sort_unstable();
        exponents.dedup();
        assert_eq!(exponents.len(), 256);
    }

    #[test]
    fn patterns_have_names_of_their_own_and_the_size_asked_for() {
        for kind in Kind::FLOATS.into_iter().chain(Width::ALL.map(Kind::int)) {
            let mut names = Vec::new();
            for (name, bytes) in all(kind, 301) {
                assert_eq!(bytes.len(), 301 * kind.width.bytes(), "{kind:?} {name}");
                names.push(name);
            }
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count);
        }
    }
}
