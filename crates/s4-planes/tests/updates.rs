//! Classes of updates and negated differences, against what their definitions say value by value.

use s4_planes::{FloatBits, Kernels, Simd, Width};

const ALL: [FloatBits; 3] = [FloatBits::BFloat16, FloatBits::Float16, FloatBits::Float32];

/// Pseudorandom bytes, and at every third place a special value, of either sign: zeros, ones,
/// infinities, denormals.
fn values(width: Width, n: usize, seed: u64) -> Vec<u8> {
    let mut x = seed;
    let next = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 40) as u32
    };
    let special = [0u32, 1, 0x7f80, 0x7f81, 0x7c00, 0x8000, 0xffff, 0xff80, 0x8001, 0x3f80];
    let mut out: Vec<u32> = std::iter::repeat_with(next).take(n).collect();
    for (i, x) in out.iter_mut().enumerate().filter(|(i, _)| i % 3 == 0) {
        *x = special[(i / 3 + seed as usize) % special.len()] << 16 | special[i % special.len()];
    }
    let bytes = |x: &u32| x.to_le_bytes()[..width.bytes()].to_vec();
    out.iter().flat_map(bytes).collect()
}

fn value(width: Width, values: &[u8], i: usize) -> u32 {
    let w = width.bytes();
    let mut bytes = [0; 4];
    bytes[..w].copy_from_slice(&values[w * i..w * (i + 1)]);
    u32::from_le_bytes(bytes)
}

/// Roughly the logarithm of a value over 2^-127, in 128ths of an octave.
fn size(bits: FloatBits, x: u32) -> i64 {
    let x = i64::from(x);
    match bits {
        FloatBits::BFloat16 => x % (1 << 15),
        FloatBits::Float16 => ((x % (1 << 15)) >> 3) + (112 << 7),
        FloatBits::Float32 => (x % (1 << 31)) >> 16,
    }
}

#[test]
fn classes_of_updates_are_what_is_defined_for_every_mix_of_dtypes() {
    let n = 2 * 512 + 77;
    for (k, bits) in (0..36).map(|i| (i, [ALL[i % 3], ALL[i / 3 % 3], ALL[i / 9 % 3]])) {
        // The last quarter has no second moments.
        let has_second = k < 27;
        let each: Vec<_> = (0..3).map(|i| values(bits[i].width(), n, (3 * k + i) as u64)).collect();
        for (floor, offset) in [(0, 0), (-20000, 8000), (i16::MIN, i16::MAX), (i16::MAX, i16::MIN)]
        {
            let expected: Vec<u8> = (0..n)
                .map(|i| {
                    let [w, m, v] =
                        [0, 1, 2].map(|j| size(bits[j], value(bits[j].width(), &each[j], i)));
                    let v = if has_second { v } else { 0 };
                    let update = (m - (v >> 1)).max(i64::from(floor));
                    let over = update - (w & 0x7f80) + i64::from(offset);
                    (over >> 6).clamp(0, 15) as u8
                })
                .collect();
            let given = std::array::from_fn(|i| {
                let values = if i < 2 || has_second { &each[i][..] } else { &[] };
                (bits[i], values)
            });
            for simd in Simd::available() {
                let mut out = vec![99; n];
                Kernels::new(simd).update_classes(given, (floor, offset), &mut out);
                assert!(out == expected, "{bits:?} {floor} {offset} {simd}");
            }
        }
    }
}

#[test]
fn differences_are_negated_where_the_other_sign_is_clear_and_back() {
    let n = 512 + 131;
    for (width, other) in [Width::B1, Width::B2, Width::B4, Width::B8]
        .into_iter()
        .flat_map(|w| [(w, Width::B2), (w, Width::B4)])
    {
        let mut buf = values(Width::B4, n * width.bytes().div_ceil(4), 5);
        buf.truncate(n * width.bytes());
        let w = width.bytes();
        // The one difference that is its own negative, and zero.
        buf[..w].fill(0xff);
        buf[w..2 * w].fill(0);
        let signs = values(other, n, 6);
        let mut expected = buf.clone();
        for (i, x) in expected.chunks_exact_mut(w).enumerate() {
            let mut bytes = [0; 8];
            bytes[..w].copy_from_slice(x);
            let u = u64::from_le_bytes(bytes);
            let d = (u >> 1) as i64 ^ -((u & 1) as i64);
            if value(other, &signs, i) >> (other.bits() - 1) == 0 {
                // The smallest difference has no positive counterpart: it wraps to itself.
                let negative = -i128::from(d);
                let wraps = negative == 1i128 << (width.bits() - 1);
                let zigzag = if negative < 0 { -2 * negative - 1 } else { 2 * negative };
                let zigzag = if wraps { i128::from(u) } else { zigzag };
                x.copy_from_slice(&zigzag.to_le_bytes()[..w]);
            }
        }
        for kernels in Simd::available().map(Kernels::new) {
            let mut out = buf.clone();
            kernels.negate_where_positive(width, &mut out, (other, &signs));
            assert!(out == expected, "{width:?} {other:?}");
            kernels.negate_where_positive(width, &mut out, (other, &signs));
            assert!(out == buf, "{width:?} {other:?}: not undone");
        }
    }
}
