//! Operations on one element at a time: XOR, the order of values, differences.
//!
//! There is one portable body for each operation; `vectorized!` compiles it again for every set of
//! instructions, and the compiler does the rest.
//!
//! # The order of values
//! A float is a sign and a magnitude; compared as two's complement integers, negative floats come
//! out in reverse. [`Word::ordered`] inverts the magnitude bits of negative values:
//!
//! ```text
//! ordered(x) = x                            if the sign bit of x is clear
//! ordered(x) = x ^ (all bits but the sign)  if it is set
//! ```
//!
//! The sign bit is kept, so which line applies can be told from the result, and each line is its
//! own inverse: the map is a bijection and undoes itself. Non-negative floats map to `0..`, in the
//! order of their magnitudes; a negative one of magnitude `m` maps to `-1 - m`. So -0.0 is -1 and
//! +0.0 is 0: neighbours, and distinct.

use crate::{Kernels, Width};

/// An unsigned integer of an element's width.
trait Word: Copy {
    /// `element = f(element)`, for each.
    fn map(buf: &mut [u8], f: impl Fn(Self) -> Self);
    /// `element = f(element, other's element)`, for each.
    fn zip(buf: &mut [u8], other: &[u8], f: impl Fn(Self, Self) -> Self);
    /// The low bits.
    fn low(x: i64) -> Self;
    fn ordered(self) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn zigzag(self) -> Self;
    fn unzigzag(self) -> Self;
}

macro_rules! word {
    ($unsigned:ty, $signed:ty) => {
        impl Word for $unsigned {
            #[inline(always)]
            fn map(buf: &mut [u8], f: impl Fn(Self) -> Self) {
                for x in buf.as_chunks_mut().0 {
                    *x = f(Self::from_le_bytes(*x)).to_le_bytes();
                }
            }
            #[inline(always)]
            fn zip(buf: &mut [u8], other: &[u8], f: impl Fn(Self, Self) -> Self) {
                for (x, y) in buf.as_chunks_mut().0.iter_mut().zip(other.as_chunks().0) {
                    *x = f(Self::from_le_bytes(*x), Self::from_le_bytes(*y)).to_le_bytes();
                }
            }
            #[inline(always)]
            fn low(x: i64) -> Self {
                x as Self
            }
            #[inline(always)]
            fn ordered(self) -> Self {
                let negative = (self as $signed >> (Self::BITS - 1)) as Self;
                self ^ negative >> 1
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }
            #[inline(always)]
            fn zigzag(self) -> Self {
                self << 1 ^ (self as $signed >> (Self::BITS - 1)) as Self
            }
            #[inline(always)]
            fn unzigzag(self) -> Self {
                self >> 1 ^ (self & 1).wrapping_neg()
            }
        }
    };
}

word!(u8, i8);
word!(u16, i16);
word!(u32, i32);
word!(u64, i64);

/// Defines functions from a portable body each, compiled for every set of instructions. In a body
/// that starts with `[width]`, `Word` is the type of an element of that width.
macro_rules! vectorized {
    ($(
        $(#[$doc:meta])*
        fn $name:ident($($arg:ident: $ty:ty),*) $([$width:ident: $word:ident])? $body:block
    )*) => {$(
        $(#[$doc])*
        pub(crate) fn $name(kernels: Kernels, $($width: Width,)? $($arg: $ty),*) {
            #[inline(always)]
            fn portable($($width: Width,)? $($arg: $ty),*) {
                vectorized!(@body [$($width: $word)?] $body)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,bmi2")]
            fn avx2($($width: Width,)? $($arg: $ty),*) {
                portable($($width,)? $($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")]
            fn avx512($($width: Width,)? $($arg: $ty),*) {
                portable($($width,)? $($arg),*)
            }
            match kernels.simd() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Kernels` holds only a set that this machine has.
                crate::Simd::Avx2 => unsafe { avx2($($width,)? $($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Kernels` holds only a set that this machine has.
                crate::Simd::Avx512 => unsafe { avx512($($width,)? $($arg),*) },
                _ => portable($($width,)? $($arg),*),
            }
        }
    )*};
    (@body [] $body:block) => { $body };
    (@body [$width:ident: $word:ident] $body:block) => {
        match $width {
            Width::B1 => { type $word = u8; $body }
            Width::B2 => { type $word = u16; $body }
            Width::B4 => { type $word = u32; $body }
            Width::B8 => { type $word = u64; $body }
        }
    };
}

vectorized! {
    /// `buf ^= other`.
    fn xor(buf: &mut [u8], other: &[u8]) {
        for (x, y) in buf.iter_mut().zip(other) {
            *x ^= y;
        }
    }

    /// Bits to ordered integers, or back.
    fn ordered(buf: &mut [u8]) [width: W] {
        W::map(buf, W::ordered)
    }

    /// Ordered integers to their differences from others.
    fn sub_ordered(buf: &mut [u8], other: &[u8]) [width: W] {
        W::zip(buf, other, |x, y| x.sub(y).zigzag())
    }

    /// Undoes `sub_ordered`.
    fn add_ordered(buf: &mut [u8], other: &[u8]) [width: W] {
        W::zip(buf, other, |d, y| d.unzigzag().add(y))
    }

    /// Bits to their differences, in the order of values, from other bits.
    fn sub_values(buf: &mut [u8], other: &[u8]) [width: W] {
        W::zip(buf, other, |x, y| x.ordered().sub(y.ordered()).zigzag())
    }

    /// Undoes `sub_values`.
    fn add_values(buf: &mut [u8], other: &[u8]) [width: W] {
        W::zip(buf, other, |d, y| d.unzigzag().add(y.ordered()).ordered())
    }

    /// Bits to their differences, in the order of values, from `offset` plus ordered integers.
    fn sub_offsets(buf: &mut [u8], offset: i64, other: &[u8]) [width: W] {
        let offset = W::low(offset);
        W::zip(buf, other, |x, y| x.ordered().sub(y.add(offset)).zigzag())
    }

    /// Undoes `sub_offsets`.
    fn add_offsets(buf: &mut [u8], offset: i64, other: &[u8]) [width: W] {
        let offset = W::low(offset);
        W::zip(buf, other, |d, y| d.unzigzag().add(y.add(offset)).ordered())
    }
}
