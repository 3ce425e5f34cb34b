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

use crate::{FloatBits, Kernels, Width};

/// Values that an operation of several steps keeps on the stack at a time.
const BLOCK: usize = 512;

/// The inputs of the sums of a row, besides the columns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sums {
    pub(crate) base: u64,
    pub(crate) row: i16,
    pub(crate) shift: u32,
}

/// An unsigned integer of an element's width.
trait Word: Copy {
    /// `element = f(element)`, for each.
    fn map(buf: &mut [u8], f: impl Fn(Self) -> Self);
    /// `element = f(element, other's element)`, for each.
    fn zip(buf: &mut [u8], other: &[u8], f: impl Fn(Self, Self) -> Self);
    /// `element = f(col)`, for each `i16` of `cols`.
    fn fill(buf: &mut [u8], cols: &[u8], f: impl Fn(i16) -> Self);
    /// `byte = f(element)`, for each.
    fn each(buf: &[u8], out: &mut [u8], f: impl Fn(Self) -> u8);
    /// `element = f(element, byte with its sign extended)`, for each byte.
    fn zip_bytes(buf: &mut [u8], bytes: &[u8], f: impl Fn(Self, Self) -> Self);
    /// All bits set if the sign bit is clear, otherwise 0.
    fn is_positive(self) -> u8;
    /// The 8 bits below the sign; for a 1-byte element, the whole byte.
    fn exponent(self) -> u8;
    /// The low bits of `x`.
    fn low(x: i64) -> Self;
    fn ordered(self) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn zigzag(self) -> Self;
    /// The zigzag integer of half of `self`, which is even, in one bit less.
    fn folded(self) -> Self;
    fn unzigzag(self) -> Self;
    /// All bits but the sign.
    fn magnitude(self) -> Self;
    /// The sign of `self`, and the other bits of `magnitude`.
    fn with_magnitude(self, magnitude: Self) -> Self;
    fn shl(self, bits: u32) -> Self;
    fn xor(self, other: Self) -> Self;
    /// `share` 256ths of the magnitude, rounded down.
    fn share(self, share: u8) -> Self;
}

macro_rules! word {
    ($unsigned:ty, $signed:ty, $product:ty) => {
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
            fn fill(buf: &mut [u8], cols: &[u8], f: impl Fn(i16) -> Self) {
                for (x, col) in buf.as_chunks_mut().0.iter_mut().zip(cols.as_chunks().0) {
                    *x = f(i16::from_le_bytes(*col)).to_le_bytes();
                }
            }
            #[inline(always)]
            fn each(buf: &[u8], out: &mut [u8], f: impl Fn(Self) -> u8) {
                for (to, x) in out.iter_mut().zip(buf.as_chunks().0) {
                    *to = f(Self::from_le_bytes(*x));
                }
            }
            #[inline(always)]
            fn zip_bytes(buf: &mut [u8], bytes: &[u8], f: impl Fn(Self, Self) -> Self) {
                for (x, byte) in buf.as_chunks_mut().0.iter_mut().zip(bytes) {
                    let byte = <$signed>::from(*byte as i8) as Self;
                    *x = f(Self::from_le_bytes(*x), byte).to_le_bytes();
                }
            }
            #[inline(always)]
            fn is_positive(self) -> u8 {
                ((self >> (Self::BITS - 1)) as u8).wrapping_sub(1)
            }
            #[inline(always)]
            fn exponent(self) -> u8 {
                (self >> Self::BITS.saturating_sub(9)) as u8
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
            fn folded(self) -> Self {
                self ^ (self as $signed >> (Self::BITS - 1)) as Self
            }
            #[inline(always)]
            fn unzigzag(self) -> Self {
                self >> 1 ^ (self & 1).wrapping_neg()
            }
            #[inline(always)]
            fn magnitude(self) -> Self {
                self & Self::MAX >> 1
            }
            #[inline(always)]
            fn with_magnitude(self, magnitude: Self) -> Self {
                self & !(Self::MAX >> 1) | magnitude.magnitude()
            }
            #[inline(always)]
            fn shl(self, bits: u32) -> Self {
                self << bits
            }
            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
            #[inline(always)]
            fn share(self, share: u8) -> Self {
                let (magnitude, share) = (self.magnitude(), <$product>::from(share));
                let high = <$product>::from(magnitude) >> 8;
                let low = <$product>::from(magnitude) & 0xff;
                // Exact, and no product wraps.
                (high * share + (low * share >> 8)) as Self
            }
        }
    };
}

word!(u8, i8, u16);
word!(u16, i16, u16);
word!(u32, i32, u32);
word!(u64, i64, u64);

/// Defines functions, each with one portable body that is compiled for every set of instructions.
/// In a body that starts with `[width]`, `Word` is the type of an element of that width.
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
pub(crate) use vectorized;

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

    /// Signs and magnitudes to signs and zigzag differences from the magnitudes of others.
    fn sub_magnitudes(buf: &mut [u8], other: &[u8]) [width: W] {
        // Twice the difference: its sign is the top bit, and the sign of `x` falls out.
        W::zip(buf, other, |x, y| x.with_magnitude(x.sub(y).shl(1).folded()))
    }

    /// Undoes `sub_magnitudes`.
    fn add_magnitudes(buf: &mut [u8], other: &[u8]) [width: W] {
        W::zip(buf, other, |d, y| d.with_magnitude(d.magnitude().unzigzag().add(y)))
    }

    /// The distance of exponents below `top`, in units of `2^shift`, at most `most`.
    fn classes(top: u8, shift: u32, most: u8, values: &[u8], out: &mut [u8]) [width: W] {
        W::each(values, out, |x| (top.saturating_sub(x.exponent()) >> shift).min(most))
    }

    /// Replaces the classes where the byte in `plane` is 1, and where it is more.
    fn replace_classes(plane: &[u8], one: u8, more: u8, classes: &mut [u8]) {
        for (class, byte) in classes.iter_mut().zip(plane) {
            let other = if *byte == 1 { one } else { more };
            *class = if *byte == 0 { *class } else { other };
        }
    }

    /// Bytes with all bits set where an element's sign bit is clear, others 0.
    fn positive(values: &[u8], out: &mut [u8]) [width: W] {
        W::each(values, out, W::is_positive)
    }

    /// Negates the zigzag integers whose byte in `negative` is all ones; the other bytes are 0.
    fn negate_where(negative: &[u8], buf: &mut [u8]) [width: W] {
        W::zip_bytes(buf, negative, |u, all| {
            // In two's complement, `-x` is `!x + 1`.
            W::low(0).sub(all).add(u.unzigzag().xor(all)).zigzag()
        })
    }

    /// The bits below signs, as [`FloatBits`] says.
    fn float_sizes(bits: FloatBits, values: &[u8], out: &mut [u16]) {
        float_sizes_of(bits, values, out);
    }

    /// The classes of updates: see [`Kernels::update_classes`].
    fn update_classes(
        values: [(FloatBits, &[u8]); 3],
        floor: i16,
        offset: i16,
        out: &mut [u8]
    ) {
        let mut blocks = [[0u16; BLOCK]; 3];
        for (i, out) in out.chunks_mut(BLOCK).enumerate() {
            for (block, (bits, values)) in blocks.iter_mut().zip(values) {
                let (first, width) = (i * BLOCK, bits.width().bytes());
                // Without second moments, sizes remain zeros.
                if let Some(values) = values.get(first * width..(first + out.len()) * width) {
                    float_sizes_of(bits, values, block);
                }
            }
            let [weight, m, v] = &blocks;
            for (((to, w), m), v) in out.iter_mut().zip(weight).zip(m).zip(v) {
                // All are below 2^15: the first difference does not wrap.
                let update = (*m as i16).wrapping_sub((*v >> 1) as i16).max(floor);
                let over = update.saturating_sub((*w & 0x7f80) as i16).saturating_add(offset);
                *to = (over >> 6).clamp(0, 15) as u8;
            }
        }
    }

    /// `base + ((row + col) << shift)` without its top bit, for each of `cols`.
    fn sums(sums: Sums, cols: &[u8], out: &mut [u8]) [width: W] {
        let base = W::low(sums.base as i64);
        W::fill(out, cols, |col| {
            let sum = W::low(i64::from(i32::from(sums.row) + i32::from(col)));
            base.add(sum.shl(sums.shift)).magnitude()
        })
    }

    /// Adds shares of the magnitudes of others: see [`Kernels::add_shares`].
    fn add_shares(share: u8, buf: &mut [u8], other: &[u8]) [width: W] {
        W::zip(buf, other, |x, y| x.add(y.share(share)).magnitude())
    }

    /// fp32 to bf16, rounded to the nearest, ties to even.
    fn to_bf16(src: &[u8], out: &mut [u8]) {
        for (to, x) in out.as_chunks_mut().0.iter_mut().zip(src.as_chunks().0) {
            let x = u32::from_le_bytes(*x);
            let up = 0x7fff + (x >> 16 & 1);
            *to = ((x.wrapping_add(up) >> 16) as u16).to_le_bytes();
        }
    }

    /// fp32 to fp16, in the same way.
    fn to_fp16(src: &[u8], out: &mut [u8]) {
        for (to, x) in out.as_chunks_mut().0.iter_mut().zip(src.as_chunks().0) {
            *to = fp16(u32::from_le_bytes(*x)).to_le_bytes();
        }
    }
}

/// Negates zigzag integers where the sign bit of another element is clear.
pub(crate) fn negate_where_positive(
    kernels: Kernels,
    width: Width,
    buf: &mut [u8],
    other: (Width, &[u8]),
) {
    let mut signs = [0; BLOCK];
    let parts = other.1.chunks(BLOCK * other.0.bytes());
    for (buf, other_values) in buf.chunks_mut(BLOCK * width.bytes()).zip(parts) {
        let signs = &mut signs[..buf.len() / width.bytes()];
        positive(kernels, other.0, other_values, signs);
        negate_where(kernels, width, signs, buf);
    }
}

/// The bits of floats below their signs, in the form of truncated bf16.
#[inline(always)]
fn float_sizes_of(bits: FloatBits, values: &[u8], out: &mut [u16]) {
    let two = values.as_chunks().0.iter().map(|x| u16::from_le_bytes(*x) & 0x7fff);
    match bits {
        FloatBits::BFloat16 => out.iter_mut().zip(two).for_each(|(to, x)| *to = x),
        // The exponent's bias is smaller by 112 in fp16.
        FloatBits::Float16 => {
            out.iter_mut().zip(two).for_each(|(to, x)| *to = (x >> 3) + (112 << 7));
        }
        FloatBits::Float32 => {
            for (to, x) in out.iter_mut().zip(values.as_chunks().0) {
                *to = (u32::from_le_bytes(*x) >> 16) as u16 & 0x7fff;
            }
        }
    }
}

/// The fp16 nearest to an fp32, ties to even; infinity for a NaN.
#[inline(always)]
pub(crate) fn fp16(x: u32) -> u16 {
    let (sign, size) = ((x >> 16 & 0x8000) as u16, x & 0x7fff_ffff);
    let normal = size.wrapping_sub(0x3800_0000).wrapping_add(0xfff + (size >> 13 & 1)) >> 13;
    // Below 2^-14 the unit in the last place stays the same; a shift by 25 bits leaves nothing.
    let bits = 126u32.saturating_sub(size >> 23).clamp(14, 25);
    let mantissa = size & 0x7f_ffff | 0x80_0000;
    let tiny = (mantissa + (1 << (bits - 1)) - 1 + (mantissa >> bits & 1)) >> bits;
    let magnitude = match size {
        0x477f_f000.. => 0x7c00,
        0x3880_0000.. => normal,
        _ => tiny,
    };
    sign | magnitude as u16
}
