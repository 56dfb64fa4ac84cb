//! Which disk holds each coordinator's seat.
//!
//! A coordinator that lost its disk has forgotten what it voted and confirmed, and must not do either again under its old id: with it, a majority could
//! decide twice. So the log knows the disk of each, every message between coordinators names its sender's disk and the one that it is for, and what comes from another
//! disk, or is for another, is dropped. Who finds that the others know it by another disk stands still, and knocks. An operator's word gives it its seat
//! anew: as an entry that the others commit without it, so that all it might have confirmed before is with them.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use types::{decode, encode};

use super::watch::Purpose;
use super::{Action, Coordinator};
use crate::command::Command;
use crate::job::USAGE;
use crate::message::FromCoordinator;
use crate::peer::{Peer, Role};

/// A message between coordinators.
#[derive(Debug, Serialize, Deserialize)]
struct Envelope {
    /// The sender's disk.
    from_disk: u128,
    /// The disk that it is for, once the sender knows it.
    to_disk: Option<u128>,
    /// Raft's; empty for a knock.
    message: Bytes,
}

/// What one coordinator knows of the others' disks beside the log.
#[derive(Debug, Default)]
pub(super) struct Seats {
    /// The disk that each spoke from last.
    seen: BTreeMap<u64, u128>,
    /// The disk that holds our own seat, if it is not ours.
    lost_to: Option<u128>,
}

impl Seats {
    pub(super) fn is_lost(&self) -> bool {
        self.lost_to.is_some()
    }
}

impl Coordinator {
    pub(super) fn envelope(&self, to: u64, message: Bytes) -> Bytes {
        let from_disk = self.config.disk();
        encode(&Envelope { from_disk, to_disk: self.roster.seat(to), message })
    }

    /// The message inside, if it comes from the right disk and is for this one.
    pub(super) fn open_envelope(&mut self, from: u64, bytes: &[u8]) -> Option<Bytes> {
        if !self.config.voters().contains_key(&from) || from == self.config.id() {
            return None;
        }
        let Envelope { from_disk, to_disk, message } = decode(bytes).ok()?;
        self.seats.seen.insert(from, from_disk);
        let own = self.config.disk();
        match to_disk.filter(|disk| *disk != own) {
            Some(disk) => {
                if self.seats.lost_to.replace(disk).is_none() {
                    self.actions.push_back(Action::LostSeat { disk });
                }
                let bytes = self.envelope(from, Bytes::new());
                self.actions.push_back(Action::SendRaft { to: from, bytes });
                return None;
            }
            // Somebody who knows nobody's disk proves nothing.
            None if self.seats.is_lost() && to_disk.is_none() => return None,
            None => {
                if self.seats.lost_to.take().is_some() {
                    self.actions.push_back(Action::FoundSeat);
                }
            }
        }
        match self.roster.seat(from) {
            Some(disk) if disk != from_disk => return None,
            Some(_) => {}
            None => self.seat(from, from_disk),
        }
        (!message.is_empty()).then_some(message)
    }

    /// Notes the disk of a coordinator that has none in the log yet.
    pub(super) fn seat(&mut self, coordinator: u64, disk: u128) {
        let is_serving = self.is_serving() && self.roster.seat(coordinator).is_none();
        let Some(leading) = self.leading.as_mut().filter(|_| is_serving) else { return };
        if !leading.seating.insert(coordinator) {
            return;
        }
        let command = Command::Seat { coordinator, disk, replaces: None };
        if !self.propose(command, None, Purpose::Seat { coordinator })
            && let Some(leading) = self.leading.as_mut()
        {
            leading.seating.remove(&coordinator);
        }
    }

    /// An operator says that a disk is lost for good.
    pub(super) fn answer_replace(&mut self, peer: &Peer, coordinator: u64, sequence: u64) {
        let refusal = if peer.role != Role::Operator {
            Some(format!("only an operator may replace a coordinator, not {}", peer.role.name()))
        } else if !self.config.voters().contains_key(&coordinator) {
            let ids: Vec<String> = self.config.voters().keys().map(u64::to_string).collect();
            Some(format!("there is no coordinator {coordinator}: there are {}", ids.join(", ")))
        } else if coordinator == self.config.id() {
            Some(format!("coordinator {coordinator} leads, so its disk is there"))
        } else {
            None
        };
        if let Some(reason) = refusal {
            return self.send(peer.key, FromCoordinator::Refused { code: USAGE, reason });
        }
        let (seat, seen) = (self.roster.seat(coordinator), self.seats.seen.get(&coordinator));
        match (seat, seen.copied()) {
            (Some(seat), Some(seen)) if seat != seen => {
                let command = Command::Seat { coordinator, disk: seen, replaces: Some(seat) };
                self.propose(command, None, Purpose::Note { key: peer.key, sequence });
            }
            (_, None) => {
                let reason = format!(
                    "coordinator {coordinator} has not been heard of: start it with an empty --data-dir first, then say this again"
                );
                self.send(peer.key, FromCoordinator::Refused { code: USAGE, reason });
            }
            // Said twice, or its disk is the right one.
            _ => self.send(peer.key, FromCoordinator::Noted { sequence }),
        }
    }
}
