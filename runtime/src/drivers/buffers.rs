//! The bytes of nodes and final chunks of the steps in hand, by name, and the numeric work on them.

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use collectives::reduce::{self, ChunkHeader};
use collectives::{Chunk, ChunkLayout, LeafReport};
use types::{Step, TreeNode, VirtualRank, VirtualRanks};
use xxhash_rust::xxh3::xxh3_64;

/// The bytes of the steps in hand.
#[derive(Debug)]
pub(crate) struct Buffers {
    layout: ChunkLayout,
    virtual_ranks: VirtualRanks,
    nodes: BTreeMap<(Step, Chunk, TreeNode), Value>,
    finals: BTreeMap<(Step, Chunk), Bytes>,
}

/// What a node is worth in one chunk.
#[derive(Debug)]
enum Value {
    Numbers { weight: u64, sum: Vec<f32> },
    Report(LeafReport),
}

/// The mean over all virtual ranks, the same bits on every member.
#[derive(Clone, Debug)]
pub struct Sum {
    /// The mean gradient.
    pub gradients: Vec<f32>,
    /// The means of what was reported, by name.
    pub reports: BTreeMap<String, f64>,
    /// Whether every element is finite.
    pub finite: bool,
    /// The sum of the squares of all elements, in f64: for gradient clipping that is equal on all members.
    pub square_sum: f64,
    /// The total weight that the sum was divided by.
    pub weight: u64,
}

impl Buffers {
    pub(crate) fn new(layout: ChunkLayout, virtual_ranks: VirtualRanks) -> Self {
        Self { layout, virtual_ranks, nodes: BTreeMap::new(), finals: BTreeMap::new() }
    }

    pub(crate) fn clear(&mut self) {
        self.nodes.clear();
        self.finals.clear();
    }

    /// Keeps a leaf's bytes in the chunks that want it.
    pub(crate) fn put_leaf(
        &mut self,
        step: Step,
        rank: VirtualRank,
        chunks: &[Chunk],
        leaf: (&[f32], &LeafReport),
    ) {
        let (gradients, report) = leaf;
        for chunk in chunks {
            let value = match self.layout.range(*chunk) {
                Some(range) => {
                    Value::Numbers { weight: report.weight(), sum: gradients[range].to_vec() }
                }
                None => Value::Report(report.clone()),
            };
            self.nodes.insert((step, *chunk, TreeNode::leaf(rank)), value);
        }
    }

    /// Whether the bytes of a node of this chunk can be right: checked before the machine hears of it.
    pub(crate) fn decode_node(&self, chunk: Chunk, body: &[u8]) -> Result<NodeValue, String> {
        let Some((weight, data)) = body.split_first_chunk::<8>() else {
            return Err(format!("a node of {} bytes", body.len()));
        };
        let weight = u64::from_le_bytes(*weight);
        match self.layout.range(chunk) {
            Some(range) => {
                let sum = reduce::from_bytes(data).map_err(|e| e.to_string())?;
                if sum.len() != range.len() {
                    return Err(format!(
                        "chunk {chunk} has {} elements, not {}",
                        range.len(),
                        sum.len()
                    ));
                }
                Ok(NodeValue(Value::Numbers { weight, sum }))
            }
            None if self.layout.has(chunk) => {
                Ok(NodeValue(Value::Report(LeafReport::decode(data).map_err(|e| e.to_string())?)))
            }
            None => Err(format!("there is no chunk {chunk}")),
        }
    }

    pub(crate) fn put_node(&mut self, step: Step, chunk: Chunk, node: TreeNode, value: NodeValue) {
        self.nodes.insert((step, chunk, node), value.0);
    }

    /// The body of a node frame.
    pub(crate) fn node_body(&self, step: Step, chunk: Chunk, node: TreeNode) -> Option<Bytes> {
        let (weight, data) = match self.nodes.get(&(step, chunk, node))? {
            Value::Numbers { weight, sum } => {
                (*weight, Bytes::copy_from_slice(reduce::as_bytes(sum)))
            }
            Value::Report(report) => (report.weight(), report.encode()),
        };
        let mut body = BytesMut::with_capacity(8 + data.len());
        body.put_u64_le(weight);
        body.put_slice(&data);
        Some(body.freeze())
    }

    /// `parent` = `left` + `right`; the two are gone.
    pub(crate) fn fold(
        &mut self,
        (step, chunk): (Step, Chunk),
        left: TreeNode,
        right: TreeNode,
        parent: TreeNode,
    ) -> Result<(), String> {
        let taken =
            self.nodes.remove(&(step, chunk, left)).zip(self.nodes.remove(&(step, chunk, right)));
        let Some((left, right)) = taken else {
            return Err(format!("no bytes for {left} and {right}"));
        };
        let value = match (left, right) {
            (Value::Numbers { weight: a, mut sum }, Value::Numbers { weight: b, sum: other }) => {
                reduce::add_into(&mut sum, &other);
                Value::Numbers { weight: a.saturating_add(b), sum }
            }
            (Value::Report(a), Value::Report(b)) => {
                Value::Report(LeafReport::combine(&a, &b).map_err(|e| e.to_string())?)
            }
            _ => return Err("a report beside numbers".to_owned()),
        };
        self.nodes.insert((step, chunk, parent), value);
        Ok(())
    }

    /// Folds the cover, divides by the total weight, and keeps the final chunk.
    pub(crate) fn finish(
        &mut self,
        step: Step,
        chunk: Chunk,
        cover: &[TreeNode],
    ) -> Result<(), String> {
        let v = self.virtual_ranks;
        let values: Option<Vec<_>> =
            cover.iter().map(|n| Some((*n, self.nodes.get(&(step, chunk, *n))?))).collect();
        let values = values.ok_or_else(|| format!("the cover of chunk {chunk} has no bytes"))?;
        let mut numbers = BTreeMap::new();
        let mut reports = BTreeMap::new();
        let mut total = 0_u64;
        for (node, value) in &values {
            match value {
                Value::Numbers { weight, sum } => {
                    total = total.saturating_add(*weight);
                    numbers.insert(*node, sum.as_slice());
                }
                Value::Report(report) => {
                    reports.insert(*node, report.clone());
                }
            }
        }
        let (header, data) = if self.layout.range(chunk).is_some() {
            let mut sum = Vec::new();
            reduce::fold_cover(v, &numbers, &mut sum).map_err(|e| e.to_string())?;
            let header = reduce::finish_mean(&mut sum, total);
            (header, Bytes::copy_from_slice(reduce::as_bytes(&sum)))
        } else {
            let report = LeafReport::fold_cover(v, &reports).map_err(|e| e.to_string())?;
            (ChunkHeader { finite: true, square_sum: 0.0 }, report.encode())
        };
        let mut body = BytesMut::with_capacity(FINAL_HEAD_BYTES + data.len());
        body.put_u64_le(0);
        body.put_u8(u8::from(header.finite));
        body.put_f64_le(header.square_sum);
        body.put_slice(&data);
        let digest = xxh3_64(&body[8..]);
        body[..8].copy_from_slice(&digest.to_le_bytes());
        self.finals.insert((step, chunk), body.freeze());
        Ok(())
    }

    /// Whether the bytes of a final chunk are whole: their digest, and their length.
    pub(crate) fn check_final(&self, chunk: Chunk, body: &[u8]) -> Result<(), String> {
        if body.len() < FINAL_HEAD_BYTES {
            return Err(format!("a final of {} bytes", body.len()));
        }
        let (digest, rest) = body.split_at(8);
        if digest != xxh3_64(rest).to_le_bytes() {
            return Err(format!("the digest of final chunk {chunk} is wrong"));
        }
        let data = &body[FINAL_HEAD_BYTES..];
        match self.layout.range(chunk) {
            Some(range) if data.len() == range.len() * size_of::<f32>() => Ok(()),
            Some(range) => Err(format!(
                "final chunk {chunk} has {} bytes, not 4 × {}",
                data.len(),
                range.len()
            )),
            None => LeafReport::decode(data).map(|_| ()).map_err(|e| e.to_string()),
        }
    }

    pub(crate) fn put_final(&mut self, step: Step, chunk: Chunk, body: Bytes) {
        self.finals.insert((step, chunk), body);
    }

    pub(crate) fn final_body(&self, step: Step, chunk: Chunk) -> Option<Bytes> {
        self.finals.get(&(step, chunk)).cloned()
    }

    pub(crate) fn drop_nodes(&mut self, step: Step) {
        self.nodes.retain(|(s, ..), _| *s > step);
    }

    pub(crate) fn drop_finals(&mut self, step: Step) {
        self.finals.retain(|(s, _), _| *s > step);
    }

    /// The whole sum of a step of which all finals are here.
    pub(crate) fn sum(&self, step: Step) -> Result<Sum, String> {
        let mut sum = Sum {
            gradients: vec![0.0; self.layout.elements()],
            reports: BTreeMap::new(),
            finite: true,
            square_sum: 0.0,
            weight: 0,
        };
        for chunk in self.layout.iter() {
            let body = self
                .finals
                .get(&(step, chunk))
                .ok_or_else(|| format!("final chunk {chunk} is missing"))?;
            let data = &body[FINAL_HEAD_BYTES..];
            if let Some(range) = self.layout.range(chunk) {
                let into = &mut sum.gradients[range];
                into.copy_from_slice(&reduce::from_bytes(data).map_err(|e| e.to_string())?);
                sum.finite &= body[8] != 0;
                let square_sum: [u8; 8] =
                    body[9..FINAL_HEAD_BYTES].try_into().map_err(|_| "short head")?;
                sum.square_sum += f64::from_le_bytes(square_sum);
            } else {
                let report = LeafReport::decode(data).map_err(|e| e.to_string())?;
                sum.weight = report.weight();
                sum.reports = report.mean(self.virtual_ranks);
            }
        }
        Ok(sum)
    }

    /// Bytes held, for metrics.
    pub(crate) fn bytes(&self) -> usize {
        let node = |value: &Value| match value {
            Value::Numbers { sum, .. } => sum.len() * size_of::<f32>(),
            Value::Report(_) => 64,
        };
        self.nodes.values().map(node).sum::<usize>()
            + self.finals.values().map(Bytes::len).sum::<usize>()
    }
}

/// A checked value of a node.
#[derive(Debug)]
pub(crate) struct NodeValue(Value);

/// xxh3 digest of the rest, finite flag, sum of squares.
const FINAL_HEAD_BYTES: usize = 8 + 1 + 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flipped_bit_in_a_final_is_noticed() {
        let v = VirtualRanks::new(2).unwrap();
        let mut buffers = Buffers::new(ChunkLayout::new(3, 1024).unwrap(), v);
        let report = LeafReport::new(1, BTreeMap::from([("loss".to_owned(), 2.0)])).unwrap();
        for rank in v.iter() {
            let chunks: Vec<Chunk> = (0..2).map(Chunk).collect();
            buffers.put_leaf(Step(0), rank, &chunks, (&[1.0, 2.0, 3.0 + rank.0 as f32], &report));
        }
        let cover: Vec<TreeNode> = v.iter().map(TreeNode::leaf).collect();
        for chunk in (0..2).map(Chunk) {
            buffers.finish(Step(0), chunk, &cover).unwrap();
            let body = buffers.final_body(Step(0), chunk).unwrap();
            assert_eq!(buffers.check_final(chunk, &body), Ok(()));
            for at in 0..body.len() {
                let mut bad = body.to_vec();
                bad[at] ^= 1;
                assert!(buffers.check_final(chunk, &bad).is_err(), "byte {at}");
            }
        }
        let sum = buffers.sum(Step(0)).unwrap();
        assert_eq!(sum.gradients, [1.0, 2.0, 3.5]);
        assert_eq!((sum.reports["loss"], sum.weight, sum.finite), (2.0, 2, true));
    }
}
