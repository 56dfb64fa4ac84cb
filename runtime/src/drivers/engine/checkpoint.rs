//! This member's part in checkpoints: stage a share at the boundary, upload it in the background, and publish if it is the writer.

use std::sync::Arc;

use bytes::Bytes;
use membership::{Intent, ToCoordinator};
use serde_json::json;
use storage::{Action as CommitAction, Commit, Contents, Receipt, SegmentIndex, Share, SharePlan};
use types::{Attempt, Digest, NodeId};

use super::{Engine, Input, Order};

/// An upload or a publication ended.
#[derive(Debug)]
pub(crate) enum StorageEvent {
    /// The share is stored.
    Uploaded { attempt: Attempt, receipt: Box<Receipt> },
    /// The manifest is stored.
    Published { attempt: Attempt, manifest: String, hash: Digest },
    /// It failed.
    Failed { attempt: Attempt, reason: String },
}

/// What the writer knows of the attempt that it will publish.
#[derive(Debug)]
pub(crate) struct Publishing {
    intent: Intent,
    extra: serde_json::Value,
    is_under_way: bool,
}

impl Publishing {
    pub(super) fn attempt(&self) -> Attempt {
        self.intent.attempt
    }
}

impl Engine {
    pub(super) fn handle_intent(&mut self, intent: Intent) {
        let is_known = self.intent.as_ref().is_some_and(|i| i.attempt >= intent.attempt)
            || self.publish.as_ref().is_some_and(|p| p.attempt() >= intent.attempt);
        if is_known || !intent.members.contains(&self.parts.me) {
            return;
        }
        if self.parts.store.is_none() {
            self.fail_checkpoint(
                intent.attempt,
                "this member has no checkpoint store: set --checkpoint".to_owned(),
            );
            return;
        }
        self.intent = Some(intent);
    }

    /// The share to stage now, if the boundary of an intent has come.
    pub(super) fn stage_order(&mut self) -> Option<Order> {
        let applied = self.cycle.applied()?;
        let intent = self.intent.take_if(|i| i.step <= applied)?;
        if intent.step < applied || self.cycle.lineage() != Some(intent.lineage) {
            self.fail_checkpoint(
                intent.attempt,
                format!("boundary {} has passed: at {applied}", intent.step),
            );
            return None;
        }
        let plan = SharePlan::new(&self.parts.layout, &intent.members);
        let segments: Vec<SegmentIndex> = plan.mine(self.parts.me).collect();
        self.parts.trace.event("stage", json!({"attempt": intent.attempt, "step": intent.step}));
        Some(Order::Stage { intent, segments })
    }

    pub(super) fn handle_staged(
        &mut self,
        intent: Intent,
        digest: Digest,
        extra: serde_json::Value,
        segments: Vec<(SegmentIndex, Bytes)>,
    ) {
        let Some(store) = self.parts.store.clone() else { return };
        let layout = Arc::clone(&self.parts.layout);
        let (sender, me) = (self.parts.sender.clone(), self.parts.me);
        let job = self.parts.settings.job.clone();
        let plan = SharePlan::new(&layout, &intent.members);
        let (attempt, lineage) = (intent.attempt, intent.lineage);
        self.parts.background.spawn(async move {
            let share = Share { job: &job, plan: &plan, node: me, attempt, lineage, state: digest };
            let event = match storage::upload(&store, share, segments, &mut |_| {}).await {
                Ok(receipt) => StorageEvent::Uploaded { attempt, receipt: Box::new(receipt) },
                Err(error) => StorageEvent::Failed { attempt, reason: error.to_string() },
            };
            let _ = sender.send(Input::Storage(event));
        });
        if intent.writer == me {
            self.publish = Some(Publishing { intent, extra, is_under_way: false });
        }
    }

    pub(super) fn handle_publish(&mut self, attempt: Attempt, receipts: Vec<(NodeId, Bytes)>) {
        let is_due = |p: &&mut Publishing| p.attempt() == attempt && !p.is_under_way;
        let Some(publishing) = self.publish.as_mut().filter(is_due) else { return };
        let Some(store) = self.parts.store.clone() else { return };
        publishing.is_under_way = true;
        let intent = &publishing.intent;
        let contents = Contents {
            job: self.parts.settings.job.clone(),
            lineage: intent.lineage,
            step: intent.step,
            attempt,
            virtual_ranks: self.parts.settings.virtual_ranks,
            layout: Arc::clone(&self.parts.layout),
            extra: publishing.extra.clone(),
        };
        let plan = SharePlan::new(&self.parts.layout, &intent.members);
        let mut commit = Commit::new(plan, contents);
        for (node, bytes) in receipts {
            match Receipt::decode(&bytes) {
                Ok(receipt) => commit.handle_receipt(node, receipt),
                Err(error) => tracing::warn!(%node, %error, "a receipt is dropped"),
            }
        }
        let manifest = match commit.poll_action() {
            Some(CommitAction::Publish(manifest)) => manifest,
            Some(CommitAction::Refuse(refusal)) => {
                return self.fail_checkpoint(attempt, refusal.to_string());
            }
            None => return self.fail_checkpoint(attempt, "receipts are missing".to_owned()),
        };
        let sender = self.parts.sender.clone();
        self.parts.background.spawn(async move {
            let event = match storage::publish(&store, &manifest).await {
                Ok(published) => StorageEvent::Published {
                    attempt,
                    manifest: published.manifest.to_string(),
                    hash: published.hash,
                },
                Err(error) => StorageEvent::Failed { attempt, reason: error.to_string() },
            };
            let _ = sender.send(Input::Storage(event));
        });
    }

    pub(super) fn handle_storage(&mut self, event: StorageEvent) {
        let Some(control) = &self.parts.control else { return };
        match event {
            StorageEvent::Uploaded { attempt, receipt } => {
                self.parts
                    .metrics
                    .checkpoint_bytes
                    .inc_by(receipt.segments.iter().map(|(.., bytes)| bytes).sum());
                control.request(ToCoordinator::Receipt {
                    attempt,
                    lineage: receipt.lineage,
                    digest: receipt.state,
                    root: receipt.root(),
                    segments: receipt.encode(),
                });
            }
            StorageEvent::Published { attempt, manifest, hash } => {
                control.request(ToCoordinator::Published { attempt, manifest, hash });
            }
            StorageEvent::Failed { attempt, reason } => {
                self.parts.metrics.checkpoint_failures.inc();
                self.fail_checkpoint(attempt, reason);
            }
        }
    }

    fn fail_checkpoint(&self, attempt: Attempt, reason: String) {
        tracing::warn!(%attempt, %reason, "checkpoint failed here");
        if let Some(control) = &self.parts.control {
            control.request(ToCoordinator::CheckpointFailed { attempt, reason });
        }
    }
}
