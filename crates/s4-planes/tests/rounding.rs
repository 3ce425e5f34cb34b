//! fp32, rounded to fp16 and bf16, against the nearest values found by search.

use s4_planes::{Kernels, Simd};

/// The exact value of finite fp16 bits, in units of 2^-24.
fn value(h: u16) -> i64 {
    let (e, m) = (i64::from(h >> 10 & 31), i64::from(h & 0x3ff));
    if e == 0 { m } else { (m + 1024) << (e - 1) }
}

/// The fp16 nearest to a positive fp32 below 65520, ties to even.
fn nearest(x: u32) -> u16 {
    // In units of 2^-24, with 48 fractional bits; whatever is below these only sets the last bit.
    let (e, m) = (i64::from(x >> 23), i128::from(x & 0x7f_ffff | 0x80_0000));
    let place = e - 127 - 23 + 24 + 48;
    let exact = if place >= 0 { m << place } else { m >> (-place).min(100) | 1 };
    let distance = |h: u16| ((i128::from(value(h)) << 48) - exact).abs();
    let (mut low, mut high) = (0u16, 0x7bffu16);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if i128::from(value(middle)) << 48 <= exact { low = middle } else { high = middle - 1 }
    }
    let above = low + 1;
    match distance(low).cmp(&distance(above)) {
        std::cmp::Ordering::Less => low,
        std::cmp::Ordering::Greater => above,
        std::cmp::Ordering::Equal => {
            if low % 2 == 0 {
                low
            } else {
                above
            }
        }
    }
}

#[test]
fn fp16_is_the_nearest_of_every_size() {
    let mut all = vec![];
    for h in 0..0x7c00u16 {
        // Each value, the midpoint to the next one, and the neighbours of both.
        let x = (value(h) as f32) * 2f32.powi(-24);
        let next = (value(h + 1) as f32) * 2f32.powi(-24);
        for x in [x.to_bits(), ((x + next) / 2.0).to_bits()] {
            all.extend([x.saturating_sub(1), x, x + 1]);
        }
    }
    all.retain(|x| *x < 0x477f_f000 && *x >= 0x0080_0000);
    let src: Vec<u8> = all.iter().flat_map(|x| x.to_le_bytes()).collect();
    let negative: Vec<u8> = all.iter().flat_map(|x| (x | 1 << 31).to_le_bytes()).collect();
    for simd in Simd::available() {
        let mut out = vec![0; src.len() / 2];
        Kernels::new(simd).to_fp16(&src, &mut out);
        for (x, h) in all.iter().zip(out.as_chunks::<2>().0) {
            assert_eq!(u16::from_le_bytes(*h), nearest(*x), "{x:08x} {simd}");
        }
        let positive = out.clone();
        Kernels::new(simd).to_fp16(&negative, &mut out);
        let signed = |(h, p): (&[u8; 2], &[u8; 2])| h[0] == p[0] && h[1] == p[1] | 0x80;
        assert!(out.as_chunks::<2>().0.iter().zip(positive.as_chunks::<2>().0).all(signed));
    }
}

#[test]
fn examples_of_the_specification() {
    let page = include_str!("../../../docs/predictors/cast.md");
    let hex = |cell: &str| u32::from_str_radix(cell.trim().trim_matches('`'), 16).ok();
    let mut seen = 0;
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> = line.split('|').collect();
        let first = |cell: &str| hex(cell.split('`').nth(1).unwrap()).unwrap();
        let (x, bf16, fp16) = (first(cells[1]), first(cells[3]), first(cells[4]));
        for simd in Simd::available() {
            let (k, mut out) = (Kernels::new(simd), [0; 2]);
            k.to_bf16(&x.to_le_bytes(), &mut out);
            assert_eq!(u32::from(u16::from_le_bytes(out)), bf16, "{line}");
            k.to_fp16(&x.to_le_bytes(), &mut out);
            assert_eq!(u32::from(u16::from_le_bytes(out)), fp16, "{line}");
        }
        seen += 1;
    }
    assert_eq!(seen, 5);
}

#[test]
fn what_is_no_number_and_what_overflows_is_defined() {
    for simd in Simd::available() {
        let (k, mut out) = (Kernels::new(simd), [0; 2]);
        for (x, bf16, fp16) in [
            (0x7f80_0000u32, 0x7f80, 0x7c00),
            (0xff80_0000, 0xff80, 0xfc00),
            (0x7fff_ffff, 0x8000, 0x7c00),
            (0xffff_ffff, 0x0000, 0xfc00),
            (0x7f7f_ffff, 0x7f80, 0x7c00),
            (0x0000_0001, 0x0000, 0x0000),
            (0x8000_0000, 0x8000, 0x8000),
        ] {
            k.to_bf16(&x.to_le_bytes(), &mut out);
            assert_eq!(u16::from_le_bytes(out), bf16, "{x:08x}");
            k.to_fp16(&x.to_le_bytes(), &mut out);
            assert_eq!(u16::from_le_bytes(out), fp16, "{x:08x}");
        }
    }
}
