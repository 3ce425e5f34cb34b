//! Contexts `update` as their page describes them.

#![expect(clippy::unwrap_used, reason = "tests")]

mod page;

use s4_format::side::{Side, SideKind};
use s4_format::{DType, LayoutId};
use s4_planes::{Kernels, Simd, Width};
use s4_predict::{ContextModel, Known, Tensor, Update, Updates};

const PAGE: &str = include_str!("../../../docs/predictors/update.md");

#[test]
fn the_example_of_the_specification() {
    let (first, second) = (DType::Float32, Some(DType::BFloat16));
    let update = Update { floor: 7800, offset: 8000, first, second };
    check(PAGE, update, &page::table(PAGE, "| p | m | v |", 4));
    assert_eq!(Updates.tables(LayoutId::FIELDS, 0), 1);
}

#[test]
fn the_example_without_a_second_moment() {
    let page = PAGE.split_once("Without a second moment, first").unwrap().1;
    let update = Update { floor: i16::MIN, offset: 1500, first: DType::BFloat16, second: None };
    check(page, update, &page::table(page, "| p | m | class |", 2));
}

/// Checks the side data that comes first on a page, and a table of parents, moments, classes, stored values, their
/// differences and residuals.
fn check(page: &str, update: Update, rows: &[Vec<&str>]) {
    let side_data = page::side_data(page);
    assert_eq!(Update::parse(&side_data).unwrap(), update);
    let column = |i: usize, dtype: DType| {
        let bytes =
            |row: &Vec<&str>| page::hex(row[i]).to_le_bytes()[..dtype.value_width()].to_vec();
        rows.iter().flat_map(bytes).collect::<Vec<u8>>()
    };
    let dtype = DType::BFloat16;
    let (parent, first) = (column(0, dtype), column(1, update.first));
    let second = update.second.map(|dtype| column(2, dtype));
    let after = 2 + usize::from(second.is_some());
    let (stored, residuals) = (column(after + 1, dtype), column(after + 3, dtype));
    let inputs = [&parent[..], &first].into_iter().chain(second.as_deref()).collect::<Vec<_>>();
    let number = |cell: &str| cell.trim().split([':', ' ']).next().unwrap().parse::<u8>().unwrap();
    let classes: Vec<u8> = rows.iter().map(|row| number(row[after])).collect();
    let mut side = Side::default();
    side.push(SideKind::CONTEXTS, side_data).unwrap();
    for kernels in Simd::available().map(Kernels::new) {
        let mut values = stored.clone();
        kernels.sub_values(Width::B2, &mut values, &parent);
        update.turn(kernels, Width::B2, &mut values, &first).unwrap();
        assert_eq!(values, residuals);
        for (plane, layout) in [(0, LayoutId::BYTES), (1, LayoutId::BYTES)] {
            assert_eq!(Updates.tables(layout, plane), 16);
            let known = Known {
                kernels,
                tensor: Tensor { dtype, shape: &[rows.len() as u64], side: &side },
                first: 0,
                layout,
                planes: &[],
                inputs: &inputs,
            };
            let mut out = vec![99; rows.len()];
            Updates.contexts(&known, &mut out).unwrap();
            assert_eq!(out[..], classes);
            // One moment too few, or too many.
            let more = [&inputs[..], &[&first]].concat();
            for inputs in [&inputs[..inputs.len() - 1], &more] {
                let bare = Known { inputs, ..known };
                assert!(Updates.contexts(&bare, &mut out).is_err());
            }
            let empty = Side::default();
            let bare = Known { tensor: Tensor { side: &empty, ..known.tensor }, ..known };
            assert!(Updates.contexts(&bare, &mut out).is_err());
        }
    }
}
