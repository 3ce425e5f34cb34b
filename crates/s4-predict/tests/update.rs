//! Contexts `update` as their page describes them.

mod page;

use s4_format::side::{Side, SideKind};
use s4_format::{DType, LayoutId};
use s4_planes::{Kernels, Simd, Width};
use s4_predict::{ContextModel, Known, Tensor, Update, Updates};

const PAGE: &str = include_str!("../../../docs/predictors/update.md");

#[test]
fn the_example_of_the_specification() {
    let side_data = page::side_data(PAGE);
    let update = Update::parse(&side_data).unwrap();
    let moments = [DType::Float32, DType::BFloat16];
    assert_eq!(update, Update { floor: 7800, offset: 8000, moments });
    let rows = page::table(PAGE, "| p | m | v |", 4);
    let column = |i: usize| rows.iter().map(move |row| page::hex(row[i]));
    let narrow = |i| column(i).flat_map(|x| (x as u16).to_le_bytes()).collect::<Vec<u8>>();
    let (parent, second, stored, residuals) = (narrow(0), narrow(2), narrow(4), narrow(6));
    let first: Vec<u8> = column(1).flat_map(u32::to_le_bytes).collect();
    let number = |cell: &str| cell.trim().split([':', ' ']).next().unwrap().parse::<u8>().unwrap();
    let classes: Vec<u8> = rows.iter().map(|row| number(row[3])).collect();
    let mut side = Side::default();
    side.push(SideKind::CONTEXTS, side_data).unwrap();
    for kernels in Simd::available().map(Kernels::new) {
        let mut values = stored.clone();
        kernels.sub_values(Width::B2, &mut values, &parent);
        update.turn(kernels, Width::B2, &mut values, &first).unwrap();
        assert_eq!(values, residuals);
        for (plane, layout) in [(0, LayoutId::BYTES), (1, LayoutId::BYTES)] {
            assert_eq!(Updates.tables(layout, plane), 16);
            let (dtype, shape) = (DType::BFloat16, &[4][..]);
            let known = Known {
                kernels,
                tensor: Tensor { dtype, shape, side: &side },
                first: 0,
                layout,
                planes: &[],
                inputs: &[&parent, &first, &second],
            };
            let mut out = [99; 4];
            Updates.contexts(&known, &mut out).unwrap();
            assert_eq!(out[..], classes);
            let bare = Known { inputs: &[&parent, &first], ..known };
            assert!(Updates.contexts(&bare, &mut out).is_err());
            let empty = Side::default();
            let bare = Known { tensor: Tensor { side: &empty, ..known.tensor }, ..known };
            assert!(Updates.contexts(&bare, &mut out).is_err());
        }
    }
    assert_eq!(Updates.tables(LayoutId::FIELDS, 0), 1);
}
