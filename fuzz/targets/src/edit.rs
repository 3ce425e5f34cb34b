//! Changes to a file in pieces, eight bytes each, so that the fuzzer inserts, drops and copies
//! whole changes.

use std::sync::Arc;

use serde_json::Value;

use crate::input::{Input, expand};
use crate::kit::{Kit, Patch};

/// Most changes to one input.
pub(crate) const MAX_EDITS: usize = 24;

/// Most nodes of a manifest, and most records of a tensor table.
const MAX_NODES: usize = 3000;
const MAX_RECORDS: usize = 20_000;

/// One change: its operation, three small numbers and a large one.
#[derive(Clone, Copy)]
pub(crate) struct Edit {
    pub(crate) op: u8,
    a: u8,
    b: u8,
    c: u8,
    v: u32,
}

impl Edit {
    pub(crate) fn read(input: &mut Input<'_>) -> Self {
        let [op, a, b, c] = input.array();
        Self { op, a, b, c, v: input.u32() }
    }

    /// 24 bits, shifted: small numbers, powers of two, and numbers near the end of the range.
    fn number(self) -> u64 {
        let (bits, how) = (u64::from(self.v & 0xff_ffff), self.v >> 24);
        if how >= 0xf0 { u64::MAX - bits } else { bits << (how % 64) }
    }

    /// Applies the change; an index beyond what is there is taken modulo its number.
    pub(crate) fn apply(self, kit: &mut Kit) {
        let Self { a, b, c, v, .. } = self;
        let number = self.number();
        let t = usize::from(a) % kit.records.len().max(1);
        match self.op % 20 {
            0..=4 => self.edit_json(&mut kit.manifest),
            5..=8 => self.edit_frame(kit, t),
            9 => {
                let (tensor, chunk) = (t, usize::from(b) % 8);
                kit.patches.push(Patch::Chunk { tensor, chunk, field: c % 5, value: number });
            }
            10 => {
                let at = 16 + 32 * t + usize::from(b) % 32;
                kit.patches.push(Patch::Table { at, len: 1 << (c % 4), value: number });
            }
            11 => {
                let dims = kit.dims.len().max(1);
                if let Some(dim) = kit.dims.get_mut(usize::from(a) % dims) {
                    *dim = number;
                }
            }
            12 => {
                // The record's name, somewhere in the pool.
                if let Some(record) = kit.records.get_mut(t) {
                    record[0..4].copy_from_slice(&(v & 0xffff).to_le_bytes());
                    record[4..6].copy_from_slice(&u16::from_le_bytes([b, c]).to_le_bytes());
                }
            }
            13 => {
                let at = [0, 4, 8][usize::from(a) % 3];
                kit.patches.push(Patch::Table { at, len: 4 + 4 * (at / 8), value: number });
            }
            14 => kit.patches.push(Patch::Footer { field: a % 2, value: number }),
            15 => self.repeat_records(kit, t),
            16 => {
                kit.share |= v & 1 == 1;
                let from = kit.blocks.get(usize::from(c) % kit.blocks.len().max(1));
                let from = from.and_then(|b| b.as_ref()?.chunks.first().cloned());
                let chunks = kit
                    .blocks
                    .get_mut(t)
                    .and_then(|b| Some(&mut Arc::make_mut(b.as_mut()?).chunks));
                if let (Some(chunk), Some(chunks)) = (from, chunks) {
                    let at = usize::from(b) % chunks.len().max(1);
                    chunks.insert(at, chunk);
                }
            }
            17 => {
                // One field of a record: dtype, rank, first dimension, plan, chunk size, kind.
                let (at, len) =
                    [(6, 1), (7, 1), (8, 4), (12, 2), (14, 1), (15, 1)][usize::from(b) % 6];
                if let Some(record) = kit.records.get_mut(t) {
                    record[at..at + len].copy_from_slice(&number.to_le_bytes()[..len]);
                }
            }
            18 => {
                let plans = kit.manifest.get_mut("plans").and_then(Value::as_array_mut);
                let Some(plans) = plans.filter(|p| !p.is_empty()) else { return };
                let at = usize::from(a) % plans.len();
                let field = ["predictor", "residual", "layout"][usize::from(b) % 3];
                if let Some(plan) = plans[at].as_object_mut() {
                    plan.insert(field.to_owned(), (c % 8).into());
                }
            }
            _ => {
                let Some(Some(block)) = kit.blocks.get_mut(t) else { return };
                let block = Arc::make_mut(block);
                match c % 3 {
                    0 => block.side.resize(usize::from(b) * 8, v as u8),
                    1 => {
                        let len = block.side.len().max(1);
                        if let Some(byte) = block.side.get_mut(v as usize % len) {
                            *byte ^= b;
                        }
                    }
                    _ => {
                        let mut side = u32::from(b % 6).to_le_bytes().to_vec();
                        let len = v % 4096;
                        side.extend(len.to_le_bytes());
                        side.extend(expand(&v.to_le_bytes(), len as usize));
                        side.resize(side.len().next_multiple_of(8), 0);
                        block.side.extend(side);
                    }
                }
            }
        }
    }

    /// Repeats a record, each time with another part of its name.
    fn repeat_records(self, kit: &mut Kit, t: usize) {
        let (Some(record), Some(block)) = (kit.records.get(t), kit.blocks.get(t)) else { return };
        let (record, block) = (*record, block.clone());
        let start = u32::from_le_bytes([record[0], record[1], record[2], record[3]]);
        // Now and then very many, since the cost of each to a reader adds up.
        let times = u32::from(self.b) << if self.c >= 0xf0 { 6 } else { 0 };
        let room = MAX_RECORDS.saturating_sub(kit.records.len());
        let copies = (1..=times).take(room).map(|i| {
            let mut copy = record;
            match self.c % 3 {
                // One long name, cut at another place each time.
                0 => copy[4] = copy[4].wrapping_sub(i as u8),
                1 => copy[0..4].copy_from_slice(&start.saturating_add(i).to_le_bytes()),
                _ => {}
            }
            copy
        });
        let copies: Vec<_> = copies.collect();
        kit.blocks.splice(t..t, std::iter::repeat_n(block, copies.len()));
        kit.records.splice(t..t, copies);
        if self.v & 1 == 1 {
            kit.names.extend(std::iter::repeat_n(b'a', (self.v >> 1) as usize % 5000));
        }
    }

    /// Turns a node of the manifest into a number, a text or another node, removes it, or adds to
    /// it.
    fn edit_json(self, manifest: &mut Value) {
        let nodes = count(manifest);
        let other = usize::from(self.c) + 256 * (self.v as usize & 1);
        let other = pick(manifest, &mut (other % nodes)).cloned().unwrap_or_default();
        let times = 1 + usize::from(self.b >> 2);
        if nodes + times * count(&other) > MAX_NODES {
            return;
        }
        let at = (usize::from(self.a) + 256 * usize::from(self.b & 3)) % nodes;
        let Some(node) = pick_mut(manifest, &mut { at }) else { return };
        const TEXTS: [&str; 6] = ["", "tree", "pickle", "a\u{1b}[31m", "\u{0}", "\u{202e}"];
        match self.op % 20 {
            0 => *node = self.number().into(),
            1 => *node = other,
            2 => match node {
                Value::Array(list) => _ = list.pop(),
                Value::Object(map) => {
                    let name = map.keys().nth(usize::from(self.c) % map.len().max(1)).cloned();
                    name.map(|name| map.remove(&name));
                }
                _ => *node = Value::Null,
            },
            3 => match node {
                Value::Array(list) => {
                    list.extend(std::iter::repeat_n(other, times));
                }
                Value::Object(map) => _ = map.insert(format!("x{}", self.v & 7), other),
                _ => *node = Value::Array(vec![other]),
            },
            _ => *node = TEXTS[self.v as usize % TEXTS.len()].into(),
        }
    }

    /// Changes a byte, a stream's entry, a stream's length, or the form of a chunk.
    fn edit_frame(self, kit: &mut Kit, t: usize) {
        let Some(Some(block)) = kit.blocks.get_mut(t) else { return };
        let block = Arc::make_mut(block);
        let chunks = block.chunks.len().max(1);
        let Some(chunk) = block.chunks.get_mut(usize::from(self.b) % chunks) else { return };
        let len = chunk.frame.len().max(1);
        match self.op % 20 {
            5 => {
                if let Some(byte) = chunk.frame.get_mut(self.v as usize % len) {
                    *byte ^= self.c;
                }
            }
            6 => {
                let entry = 8 * usize::from(self.c % 8);
                if let Some(to) = chunk.frame.get_mut(entry..entry + 2) {
                    to.copy_from_slice(&(self.v as u16).to_le_bytes());
                }
            }
            7 => {
                let by = (self.v >> 8) as usize % 5000;
                let entry = 8 * usize::from(self.c % 8) + 4;
                if self.v & 1 == 0 {
                    chunk.frame.extend(expand(&self.v.to_le_bytes(), by));
                } else {
                    chunk.frame.truncate(chunk.frame.len().saturating_sub(by));
                }
                // If the entry is the last stream's, that stream grows or shrinks with the frame.
                if let Some(to) = chunk.frame.get_mut(entry..entry + 4) {
                    let old = u32::from_le_bytes([to[0], to[1], to[2], to[3]]);
                    let by = by as u32;
                    let new =
                        if self.v & 1 == 0 { old.wrapping_add(by) } else { old.wrapping_sub(by) };
                    to.copy_from_slice(&new.to_le_bytes());
                }
            }
            _ => chunk.plain = !chunk.plain,
        }
    }
}

/// The number of nodes of a JSON value, itself included.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(count).sum(),
        Value::Object(map) => map.values().map(count).sum(),
        _ => 0usize,
    }
}

/// The node at index `at`, front to back.
fn pick<'a>(value: &'a Value, at: &mut usize) -> Option<&'a Value> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Value::Array(list) => list.iter().find_map(|v| pick(v, at)),
        Value::Object(map) => map.values().find_map(|v| pick(v, at)),
        _ => None,
    }
}

/// As [`pick`], but mutable.
fn pick_mut<'a>(value: &'a mut Value, at: &mut usize) -> Option<&'a mut Value> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Value::Array(list) => list.iter_mut().find_map(|v| pick_mut(v, at)),
        Value::Object(map) => map.values_mut().find_map(|v| pick_mut(v, at)),
        _ => None,
    }
}
