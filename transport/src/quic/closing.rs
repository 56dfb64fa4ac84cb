//! A congestion controller that lets the last packet of a connection through.
//!
//! quinn holds the packet that says "closed" back while the congestion window is full and data waits, and then forgets the connection:
//! under load the peer would hear of a close by a reset, or by silence. So whoever closes says so here first, and the window opens. The
//! rest is Cubic.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use quinn::VarInt;
use quinn::congestion::{Controller, ControllerFactory, ControllerMetrics, CubicConfig};
use quinn_proto::RttEstimator;

/// Closes a connection, and makes sure that the peer is told. Only the first reason counts.
pub(super) fn close(connection: &quinn::Connection, code: VarInt, reason: &str) {
    if connection.close_reason().is_some() {
        return;
    }
    if let Ok(controller) = connection.congestion_state().into_any().downcast::<Closeable>() {
        controller.closing.store(true, Ordering::Relaxed);
    }
    connection.close(code, reason.as_bytes());
}

/// Makes the controllers of one endpoint's connections.
#[derive(Debug)]
pub(super) struct CloseableConfig {
    cubic: Arc<CubicConfig>,
    endpoint_closing: Arc<AtomicBool>,
}

impl CloseableConfig {
    /// For an endpoint that sets `endpoint_closing` before it closes all connections at once.
    pub(super) fn new(initial_window_bytes: u64, endpoint_closing: &Arc<AtomicBool>) -> Self {
        let mut cubic = CubicConfig::default();
        cubic.initial_window(initial_window_bytes);
        Self { cubic: Arc::new(cubic), endpoint_closing: Arc::clone(endpoint_closing) }
    }
}

impl ControllerFactory for CloseableConfig {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        Box::new(Closeable {
            inner: Arc::clone(&self.cubic).build(now, current_mtu),
            endpoint_closing: Arc::clone(&self.endpoint_closing),
            closing: Arc::default(),
        })
    }
}

struct Closeable {
    inner: Box<dyn Controller>,
    endpoint_closing: Arc<AtomicBool>,
    /// Shared with the clones that `congestion_state` gives out.
    closing: Arc<AtomicBool>,
}

impl Controller for Closeable {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        self.inner.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        app_limited: bool,
        rtt: &RttEstimator,
    ) {
        self.inner.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(
        &mut self,
        now: Instant,
        in_flight: u64,
        app_limited: bool,
        largest_packet_num_acked: Option<u64>,
    ) {
        self.inner.on_end_acks(now, in_flight, app_limited, largest_packet_num_acked);
    }

    fn on_congestion_event(
        &mut self,
        now: Instant,
        sent: Instant,
        is_persistent_congestion: bool,
        lost_bytes: u64,
    ) {
        self.inner.on_congestion_event(now, sent, is_persistent_congestion, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.inner.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        let closing =
            self.closing.load(Ordering::Relaxed) || self.endpoint_closing.load(Ordering::Relaxed);
        // Above 32 bits quinn does not pace either.
        if closing { u64::MAX } else { self.inner.window() }
    }

    fn metrics(&self) -> ControllerMetrics {
        self.inner.metrics()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self {
            inner: self.inner.clone_box(),
            endpoint_closing: Arc::clone(&self.endpoint_closing),
            closing: Arc::clone(&self.closing),
        })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
