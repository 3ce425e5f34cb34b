//! The choice of kernels, and the checks of sizes before them.

use std::ops::Range;

use s4_format::{Result, crc32c_append};

use crate::scalar::{self, PLAIN, ROTATED, SPREAD};
use crate::{FloatBits, Kernels, Simd, StepFactors, Width, lanewise, step, token, token_bound};

#[cfg(target_arch = "aarch64")]
use crate::neon;
#[cfg(target_arch = "x86_64")]
use crate::x86::{self, avx2, avx512};

/// Calls the first kernel for the chosen set of instructions whose case matches the key, or else
/// the portable one.
macro_rules! dispatch {
    (($simd:expr, $key:expr) {
        $($arch:literal: $($set:ident, $case:pat $(if $guard:expr)? => $call:expr;)*)*
    } else $portable:expr) => {
        match ($simd, $key) {
            $($(
                #[cfg(target_arch = $arch)]
                // SAFETY: `Kernels::new` keeps only a set of instructions that this machine has.
                (Simd::$set, $case) $(if $guard)? => unsafe { $call },
            )*)*
            _ => $portable,
        }
    };
}

impl Kernels {
    /// Layout `fields`. Each element is rotated left by one bit, which brings the sign to bit 0;
    /// its top byte goes to `e`, the byte below to `a`, and the low `width - 2` bytes,
    /// little-endian, to `b`. For bf16 and fp32, `e` is the exponent.
    ///
    /// # Panics
    /// If `width` is not 2, 4 or 8 bytes, or the sizes are not `n * width` for `src`, `n` for `e`
    /// and `a`, and `n * (width - 2)` for `b`.
    pub fn split_fields(self, width: Width, src: &[u8], e: &mut [u8], a: &mut [u8], b: &mut [u8]) {
        check_fields(width, src.len(), [e.len(), a.len(), b.len()]);
        self.split_form::<ROTATED>(width, src, &mut [], e, a, b);
    }

    /// Undoes [`Kernels::split_fields`].
    ///
    /// # Panics
    /// As [`Kernels::split_fields`], with `dst` for `src`.
    pub fn merge_fields(self, width: Width, e: &[u8], a: &[u8], b: &[u8], dst: &mut [u8]) {
        check_fields(width, dst.len(), [e.len(), a.len(), b.len()]);
        self.merge_form::<ROTATED>(width, &[], e, a, b, dst);
    }

    /// As [`Kernels::merge_fields`]; also returns the CRC-32C of some bytes followed by `dst`,
    /// given `crc`, the CRC-32C of the first.
    ///
    /// # Panics
    /// As [`Kernels::merge_fields`].
    pub fn merge_fields_crc(
        self,
        width: Width,
        e: &[u8],
        a: &[u8],
        b: &[u8],
        dst: &mut [u8],
        crc: u32,
    ) -> u32 {
        check_fields(width, dst.len(), [e.len(), a.len(), b.len()]);
        dispatch!((self.simd(), width) {
            "x86_64":
            Avx512, Width::B2 => avx512::merge2::<ROTATED, true>(&[], e, a, dst, crc);
            Avx512, Width::B4 => avx512::merge4::<ROTATED, true>(&[], e, a, b, dst, crc);
        } else {
            self.merge_form::<ROTATED>(width, &[], e, a, b, dst);
            crc32c_append(crc, dst)
        })
    }

    /// Layout `fields-sign`. The signs go to `s`, that of element `i` to bit `i % 8` of byte
    /// `i / 8`; bits after the last element are zero. Of the bits below the sign, the top 8 go to
    /// `e`, the next 7 to `a` (as a byte below 128), and the low `width - 2` bytes to `b`.
    ///
    /// # Panics
    /// If `width` is not 2, 4 or 8 bytes, or the sizes are not `n * width` for `src`, `n / 8`
    /// rounded up for `s`, `n` for `e` and `a`, and `n * (width - 2)` for `b`.
    pub fn split_fields_sign(
        self,
        width: Width,
        src: &[u8],
        s: &mut [u8],
        e: &mut [u8],
        a: &mut [u8],
        b: &mut [u8],
    ) {
        let n = check_fields(width, src.len(), [e.len(), a.len(), b.len()]);
        assert_eq!(s.len(), n.div_ceil(8), "size of the sign plane");
        self.split_form::<SPREAD>(width, src, s, e, a, b);
    }

    /// Undoes [`Kernels::split_fields_sign`]. The top bit of each byte of `a`, and the bits of `s`
    /// after the last element, which a split leaves zero, are ignored.
    ///
    /// # Panics
    /// As [`Kernels::split_fields_sign`], with `dst` for `src`.
    pub fn merge_fields_sign(
        self,
        width: Width,
        s: &[u8],
        e: &[u8],
        a: &[u8],
        b: &[u8],
        dst: &mut [u8],
    ) {
        let n = check_fields(width, dst.len(), [e.len(), a.len(), b.len()]);
        assert_eq!(s.len(), n.div_ceil(8), "size of the sign plane");
        self.merge_form::<SPREAD>(width, s, e, a, b, dst);
    }

    fn split_form<const FORM: u8>(
        self,
        width: Width,
        src: &[u8],
        s: &mut [u8],
        e: &mut [u8],
        a: &mut [u8],
        b: &mut [u8],
    ) {
        dispatch!((self.simd(), width) {
            "x86_64":
            Avx512, Width::B2 => avx512::split2::<FORM>(src, s, e, a);
            Avx512, Width::B4 => avx512::split4::<FORM>(src, s, e, a, b);
            Avx2, Width::B2 => avx2::split2::<FORM>(src, s, e, a);
            Avx2, Width::B4 => avx2::split4::<FORM>(src, s, e, a, b);
            "aarch64":
            Neon, Width::B2 if FORM != SPREAD => neon::split2::<FORM>(src, e, a);
            Neon, Width::B4 if FORM != SPREAD => neon::split4::<FORM>(src, e, a, b);
        } else match width {
            Width::B2 => scalar::split::<2, FORM>(src, s, e, a, b),
            Width::B4 => scalar::split::<4, FORM>(src, s, e, a, b),
            _ => scalar::split::<8, FORM>(src, s, e, a, b),
        })
    }

    fn merge_form<const FORM: u8>(
        self,
        width: Width,
        s: &[u8],
        e: &[u8],
        a: &[u8],
        b: &[u8],
        dst: &mut [u8],
    ) {
        dispatch!((self.simd(), width) {
            "x86_64":
            Avx512, Width::B2 => _ = avx512::merge2::<FORM, false>(s, e, a, dst, 0);
            Avx512, Width::B4 => _ = avx512::merge4::<FORM, false>(s, e, a, b, dst, 0);
            Avx2, Width::B2 => avx2::merge2::<FORM>(s, e, a, dst);
            Avx2, Width::B4 => avx2::merge4::<FORM>(s, e, a, b, dst);
            "aarch64":
            Neon, Width::B2 if FORM != SPREAD => neon::merge2::<FORM>(e, a, dst);
            Neon, Width::B4 if FORM != SPREAD => neon::merge4::<FORM>(e, a, b, dst);
        } else match width {
            Width::B2 => scalar::merge::<2, FORM>(s, e, a, b, dst),
            Width::B4 => scalar::merge::<4, FORM>(s, e, a, b, dst),
            _ => scalar::merge::<8, FORM>(s, e, a, b, dst),
        })
    }

    /// Layout `bytes`: one plane of `n` bytes for each byte of an element, the most significant
    /// first, one plane after the other in `dst`.
    ///
    /// # Panics
    /// If the sizes are not both `n * width`.
    pub fn split_bytes(self, width: Width, src: &[u8], dst: &mut [u8]) {
        check_elements(width, src.len());
        assert_eq!(dst.len(), src.len(), "size of the planes");
        self.split_bytes_part(width, src, 0, dst);
    }

    /// As [`Kernels::split_bytes`], for a part of the elements: `src` holds those from index
    /// `first` on, and `dst` the planes of all.
    ///
    /// # Panics
    /// If the sizes are not multiples of `width`, or `src` reaches beyond the elements of `dst`.
    pub fn split_bytes_part(self, width: Width, src: &[u8], first: usize, dst: &mut [u8]) {
        let part = first..first + check_elements(width, src.len());
        let n = check_elements(width, dst.len());
        match width {
            Width::B1 => dst[part].copy_from_slice(src),
            Width::B2 => {
                let [high, low] = planes_mut(n, part, dst);
                self.split_form::<PLAIN>(width, src, &mut [], high, low, &mut []);
            }
            Width::B4 => {
                let planes = planes_mut(n, part, dst);
                dispatch!((self.simd(), ()) {
                    "x86_64":
                    Avx512, () => avx512::split_bytes4(src, planes);
                    Avx2, () => avx2::split_bytes4(src, planes);
                    "aarch64":
                    Neon, () => neon::split_bytes4(src, planes);
                } else scalar::split_bytes::<4>(src, planes))
            }
            Width::B8 => scalar::split_bytes::<8>(src, planes_mut(n, part, dst)),
        }
    }

    /// Undoes [`Kernels::split_bytes`].
    ///
    /// # Panics
    /// If the sizes are not both `n * width`.
    pub fn merge_bytes(self, width: Width, src: &[u8], dst: &mut [u8]) {
        let n = check_elements(width, dst.len());
        assert_eq!(src.len(), dst.len(), "size of the planes");
        match width {
            Width::B1 => dst.copy_from_slice(src),
            Width::B2 => {
                let (high, low) = src.split_at(n);
                self.merge_form::<PLAIN>(width, &[], high, low, &[], dst);
            }
            Width::B4 => {
                let planes = planes(n, src);
                dispatch!((self.simd(), ()) {
                    "x86_64":
                    Avx512, () => avx512::merge_bytes4(planes, dst);
                    Avx2, () => avx2::merge_bytes4(planes, dst);
                    "aarch64":
                    Neon, () => neon::merge_bytes4(planes, dst);
                } else scalar::merge_bytes::<4>(planes, dst))
            }
            Width::B8 => scalar::merge_bytes::<8>(planes(n, src), dst),
        }
    }

    /// Layout `token`, for zigzag integers (the output of the `sub_..` methods): one token per
    /// element, and the bits that it does not hold, packed, at the start of `bits`. Returns the
    /// number of bytes; those of `bits` after them are unspecified.
    ///
    /// With `m = u >> 1` of `n` bits, the token of `u` is `u & 1` if `m` is 0, otherwise
    /// `2 * (1 + ((n - 1) << t | top)) + (u & 1)`, where `top` are the `t` bits below the leading
    /// one (zeros where there are fewer), and `t` is 4, 3, 2, 1 for 1, 2, 4, 8 bytes. The
    /// `n - 1 - t` bits below, if any, follow those of the element before, least significant bit
    /// first. The last byte is filled up with zeros.
    ///
    /// # Panics
    /// If the sizes are not `n * width` for `src` and `n` for `tokens`, or
    /// `bits` is shorter than [`token_bound`].
    pub fn split_token(
        self,
        width: Width,
        src: &[u8],
        tokens: &mut [u8],
        bits: &mut [u8],
    ) -> usize {
        let n = check_elements(width, src.len());
        assert_eq!(tokens.len(), n, "size of the token plane");
        assert!(bits.len() >= token_bound(width, n), "buffer is too small for the bits");
        dispatch!((self.simd(), ()) {
            "x86_64":
            Avx512, () => x86::split_token(width, src, tokens, bits);
            Avx2, () => x86::split_token(width, src, tokens, bits);
        } else token::split(width, src, tokens, bits))
    }

    /// Undoes [`Kernels::split_token`]: `bits` has exactly the bytes that it wrote. Any `tokens`
    /// and `bits` are allowed.
    ///
    /// # Errors
    /// `Corrupt` if a token is not one of this width, or `bits` is longer than the tokens say, or
    /// not zero after the last element; `Truncated` if it is shorter. `dst` is untouched then.
    ///
    /// # Panics
    /// If the sizes are not `n` for `tokens` and `n * width` for `dst`.
    pub fn merge_token(
        self,
        width: Width,
        tokens: &[u8],
        bits: &[u8],
        dst: &mut [u8],
    ) -> Result<()> {
        let n = check_elements(width, dst.len());
        assert_eq!(tokens.len(), n, "size of the token plane");
        dispatch!((self.simd(), ()) {
            "x86_64":
            Avx512, () => x86::merge_token(width, tokens, bits, dst);
            Avx2, () => x86::merge_token(width, tokens, bits, dst);
        } else token::merge(width, tokens, bits, dst))
    }

    /// `buf ^= other`, its own inverse.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn xor(self, buf: &mut [u8], other: &[u8]) {
        assert_eq!(buf.len(), other.len(), "operands of XOR differ in size");
        lanewise::xor(self, buf, other);
    }

    /// Float bits to ordered integers: two's complement integers in the order of the values. A
    /// float whose sign bit is clear maps to its own bits; if it is set, all the other bits are
    /// inverted. -0.0 becomes -1 and +0.0 stays 0. The map is a bijection of all bit patterns, and
    /// its own inverse.
    ///
    /// # Panics
    /// If the size is not a multiple of `width`.
    pub fn to_ordered(self, width: Width, buf: &mut [u8]) {
        check_elements(width, buf.len());
        lanewise::ordered(self, width, buf);
    }

    /// Undoes [`Kernels::to_ordered`].
    ///
    /// # Panics
    /// If the size is not a multiple of `width`.
    pub fn from_ordered(self, width: Width, buf: &mut [u8]) {
        self.to_ordered(width, buf);
    }

    /// `buf = zigzag(buf - other)`, both ordered integers; the difference `d` wraps, and
    /// `zigzag(d)` is `d << 1 ^ d >> (bits - 1)`: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...
    ///
    /// # Panics
    /// If the sizes differ, or are not a multiple of `width`.
    pub fn sub_ordered(self, width: Width, buf: &mut [u8], other: &[u8]) {
        check_pair(width, buf, other);
        lanewise::sub_ordered(self, width, buf, other);
    }

    /// Undoes [`Kernels::sub_ordered`].
    ///
    /// # Panics
    /// As [`Kernels::sub_ordered`].
    pub fn add_ordered(self, width: Width, buf: &mut [u8], other: &[u8]) {
        check_pair(width, buf, other);
        lanewise::add_ordered(self, width, buf, other);
    }

    /// As [`Kernels::sub_ordered`], where `buf` and `other` are float bits.
    ///
    /// # Panics
    /// As [`Kernels::sub_ordered`].
    pub fn sub_values(self, width: Width, buf: &mut [u8], other: &[u8]) {
        check_pair(width, buf, other);
        lanewise::sub_values(self, width, buf, other);
    }

    /// Undoes [`Kernels::sub_values`].
    ///
    /// # Panics
    /// As [`Kernels::sub_ordered`].
    pub fn add_values(self, width: Width, buf: &mut [u8], other: &[u8]) {
        check_pair(width, buf, other);
        lanewise::add_values(self, width, buf, other);
    }

    /// Keeps the sign bit of each element, and replaces its other `n` bits by their difference from
    /// those of `other`'s element, as a zigzag integer of `n` bits. The difference wraps.
    ///
    /// # Panics
    /// As [`Kernels::sub_ordered`].
    pub fn sub_magnitudes(self, width: Width, buf: &mut [u8], other: &[u8]) {
        check_pair(width, buf, other);
        lanewise::sub_magnitudes(self, width, buf, other);
    }

    /// Undoes [`Kernels::sub_magnitudes`].
    ///
    /// # Panics
    /// As [`Kernels::sub_ordered`].
    pub fn add_magnitudes(self, width: Width, buf: &mut [u8], other: &[u8]) {
        check_pair(width, buf, other);
        lanewise::add_magnitudes(self, width, buf, other);
    }

    /// Writes, for each element, the distance of the 8 bits below its sign from `top` downwards, in units of `2^shift`,
    /// but at most `most`.
    ///
    /// # Panics
    /// If the sizes are not `n * width` for `values` and `n` for `out`, or `shift` is 8 or more.
    pub fn classes(
        self,
        width: Width,
        (top, shift, most): (u8, u32, u8),
        values: &[u8],
        out: &mut [u8],
    ) {
        assert_eq!(out.len(), check_elements(width, values.len()), "number of classes");
        assert!(shift < 8, "shift of {shift} bits is out of range");
        lanewise::classes(self, width, top, shift, most, values, out);
    }

    /// Replaces the class of each element whose byte in `plane` is not 0: by `one` if the byte is
    /// 1, otherwise by `more`.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn replace_classes(self, plane: &[u8], (one, more): (u8, u8), classes: &mut [u8]) {
        assert_eq!(plane.len(), classes.len(), "number of classes");
        lanewise::replace_classes(self, plane, one, more, classes);
    }

    /// Negates the zigzag integers in `buf`, such as [`Kernels::sub_values`] writes, where the sign
    /// bit of the element of `other` at the same position is clear. The negation wraps and is its
    /// own inverse.
    ///
    /// # Panics
    /// If the sizes are not multiples of the widths, or the numbers of elements differ.
    pub fn negate_where_positive(self, width: Width, buf: &mut [u8], other: (Width, &[u8])) {
        let n = check_elements(width, buf.len());
        assert_eq!(check_elements(other.0, other.1.len()), n, "number of signs");
        lanewise::negate_where_positive(self, width, buf, other);
    }

    /// Writes the bits of floats below their signs, as 15 bits: see [`FloatBits`].
    ///
    /// # Panics
    /// If the numbers of elements of `values` and `out` differ.
    pub fn float_sizes(self, bits: FloatBits, values: &[u8], out: &mut [u16]) {
        assert_eq!(check_elements(bits.width(), values.len()), out.len(), "number of sizes");
        lanewise::float_sizes(self, bits, values, out);
    }

    /// Writes the sizes of the updates of weights, as classes of half an octave, 0 to 15. `values` are the weights, the
    /// first and the second moments. If there are no second moments, they count as zeros. With the bits of each as
    /// [`FloatBits`] says, in 128ths of an octave:
    ///
    /// ```text
    /// class = min(15, max(0, (max(first - (second >> 1), floor) - (weight & 7f80) + offset) >> 6))
    /// ```
    ///
    /// # Panics
    /// If the numbers of elements of `values` and `out` differ.
    pub fn update_classes(
        self,
        values: [(FloatBits, &[u8]); 3],
        (floor, offset): (i16, i16),
        out: &mut [u8],
    ) {
        let has_second = !values[2].1.is_empty();
        for (bits, values) in &values[..if has_second { 3 } else { 2 }] {
            assert_eq!(check_elements(bits.width(), values.len()), out.len(), "number of classes");
        }
        lanewise::update_classes(self, values, floor, offset, out);
    }

    /// Writes the weights after the step of an optimizer: `values` are the weights, the first and the second moments.
    /// If there are no second moments, they count as zeros. In fp32, in this order, each operation rounded to the
    /// nearest, ties to even, and each operand and result below 2^-125 in size replaced by +0:
    ///
    /// ```text
    /// x = weight * keep - first / (sqrt(second) + epsilon) * rate
    /// ```
    ///
    /// If `x` is not finite, it is the weight. The result is `x` in the format of the weight: for bf16 rounded as by
    /// [`Kernels::to_bf16`], for fp16 as by [`Kernels::to_fp16`].
    ///
    /// # Panics
    /// If the numbers of elements of `values` and `out` differ.
    pub fn optimizer_step(
        self,
        factors: StepFactors,
        values: [(FloatBits, &[u8]); 3],
        out: &mut [u8],
    ) {
        let elements = check_elements(values[0].0.width(), out.len());
        let has_second = !values[2].1.is_empty();
        for (bits, values) in &values[..if has_second { 3 } else { 2 }] {
            assert_eq!(check_elements(bits.width(), values.len()), elements, "number of weights");
        }
        step::stepped(self, factors, values, out);
    }

    /// Writes floats as fp32, which is exact.
    ///
    /// # Panics
    /// If the numbers of elements of `values` and `out` differ.
    pub fn to_floats(self, bits: FloatBits, values: &[u8], out: &mut [f32]) {
        assert_eq!(check_elements(bits.width(), values.len()), out.len(), "number of floats");
        step::floats(self, bits, values, out);
    }

    /// Rounds fp32 to bf16: to the nearest, ties to even. NaNs get no special treatment: they may
    /// become other NaNs, infinities or zeros.
    ///
    /// # Panics
    /// If the sizes are not `4 * n` for `src` and `2 * n` for `out`.
    pub fn to_bf16(self, src: &[u8], out: &mut [u8]) {
        assert_eq!(
            2 * check_elements(Width::B4, src.len()),
            out.len(),
            "size of the rounded values"
        );
        lanewise::to_bf16(self, src, out);
    }

    /// As [`Kernels::to_bf16`], but to fp16, and NaNs become infinities.
    ///
    /// # Panics
    /// As [`Kernels::to_bf16`].
    pub fn to_fp16(self, src: &[u8], out: &mut [u8]) {
        assert_eq!(
            2 * check_elements(Width::B4, src.len()),
            out.len(),
            "size of the rounded values"
        );
        lanewise::to_fp16(self, src, out);
    }

    /// Writes `base + ((row + col) << shift)` for each `i16` of `cols`, which is little-endian.
    /// Sums wrap, and their top bit is cleared.
    ///
    /// # Panics
    /// If the sizes are not `n * width` for `out` and `2 * n` for `cols`, or `shift` is not below the bits of an
    /// element.
    pub fn sums(
        self,
        width: Width,
        (base, row, shift): (u64, i16, u32),
        cols: &[u8],
        out: &mut [u8],
    ) {
        let n = check_elements(width, out.len());
        assert_eq!(cols.len(), 2 * n, "size of the columns");
        assert!(shift < width.bits(), "shift of {shift} bits is out of range");
        lanewise::sums(self, width, lanewise::Sums { base, row, shift }, cols, out);
    }

    /// Adds to each element of `buf` `share` 256ths, rounded down, of the bits below the sign of
    /// `other`'s element. Sums wrap, and their top bit is cleared.
    ///
    /// # Panics
    /// If the sizes differ, or are not whole elements.
    pub fn add_shares(self, width: Width, share: u8, buf: &mut [u8], other: &[u8]) {
        check_elements(width, buf.len());
        assert_eq!(buf.len(), other.len(), "operands of shares differ in size");
        lanewise::add_shares(self, width, share, buf, other);
    }
}

/// The number of elements in `len` bytes.
fn check_elements(width: Width, len: usize) -> usize {
    assert_eq!(len % width.bytes(), 0, "size is not a multiple of {} bytes", width.bytes());
    len / width.bytes()
}

/// Checks the sizes of the planes `e`, `a` and `b`; returns the number of elements.
fn check_fields(width: Width, len: usize, planes: [usize; 3]) -> usize {
    assert!(
        matches!(width, Width::B2 | Width::B4 | Width::B8),
        "values of {width:?} have no fields"
    );
    let n = check_elements(width, len);
    assert_eq!(planes, [n, n, n * (width.bytes() - 2)], "sizes of planes e, a and b");
    n
}

fn check_pair(width: Width, buf: &[u8], other: &[u8]) {
    check_elements(width, buf.len());
    assert_eq!(buf.len(), other.len(), "operands of a difference differ in size");
}

/// `W` planes of `n` bytes, one after the other.
fn planes<const W: usize>(n: usize, src: &[u8]) -> [&[u8]; W] {
    std::array::from_fn(|p| &src[p * n..][..n])
}

/// Parts of `W` planes of `n` bytes, one after the other.
fn planes_mut<const W: usize>(n: usize, part: Range<usize>, mut rest: &mut [u8]) -> [&mut [u8]; W] {
    std::array::from_fn(|_| {
        let (plane, after) = std::mem::take(&mut rest).split_at_mut(n);
        rest = after;
        &mut plane[part.clone()]
    })
}
