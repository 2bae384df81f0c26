//! Counters of the server in the OpenMetrics text format, beside those of the node. No global registry.

use aenv_node::control::Stats;
use http::Method;
use prometheus_client::{
    collector::Collector,
    encoding::{
        DescriptorEncoder, EncodeLabelSet, EncodeMetric, NoLabelSet,
        text::{encode_eof, encode_registry},
    },
    metrics::{
        MetricType,
        counter::Counter,
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::Histogram,
    },
    registry::Registry,
};
use std::{collections::BTreeMap, fmt, time::Duration};

/// Labels of a request. All bounded: routes are templates, methods those we know.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    plane: &'static str,
    route: String,
    method: &'static str,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Route {
    plane: &'static str,
    route: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Direction {
    direction: &'static str,
}

type Seconds = Family<Route, Histogram, fn() -> Histogram>;

/// Counts bytes through the proxy in one direction.
#[derive(Debug, Clone)]
pub(crate) struct Bytes(Counter);

impl Bytes {
    pub(crate) fn add(&self, bytes: usize) {
        self.0.inc_by(u64::try_from(bytes).unwrap_or(u64::MAX));
    }
}

/// All of the server's own metrics.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Request, Counter>,
    seconds: Seconds,
    /// Open client connections.
    pub(crate) connections: Gauge,
    /// Guest requests and tunnels under way.
    pub(crate) active: Gauge,
    /// Client to guest.
    pub(crate) up: Bytes,
    /// Guest to client.
    pub(crate) down: Bytes,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("aenv");
        let requests = Family::<Request, Counter>::default();
        registry.register("http_requests", "Requests answered", requests.clone());
        let seconds = Seconds::new_with_constructor(|| {
            Histogram::new([0.001, 0.005, 0.02, 0.1, 0.4, 1.0, 3.0, 10.0, 60.0])
        });
        registry.register("http_request_seconds", "From a request's head to its response's", seconds.clone());
        let connections = Gauge::default();
        registry.register("http_connections", "Open client connections", connections.clone());
        let active = Gauge::default();
        registry.register("proxy_active", "Guest requests and tunnels under way", active.clone());
        let bytes = Family::<Direction, Counter>::default();
        registry.register("proxy_bytes", "Body and tunnel bytes through the proxy", bytes.clone());
        let counter = |direction| Bytes(bytes.get_or_create_owned(&Direction { direction }));
        Self { requests, seconds, connections, active, up: counter("up"), down: counter("down"), registry }
    }

    /// One answered request.
    pub(crate) fn answered(
        &self,
        plane: &'static str,
        route: &str,
        method: &Method,
        status: u16,
        took: Duration,
    ) {
        let method = match *method {
            Method::GET => "GET",
            Method::HEAD => "HEAD",
            Method::POST => "POST",
            Method::PUT => "PUT",
            Method::PATCH => "PATCH",
            Method::DELETE => "DELETE",
            Method::OPTIONS => "OPTIONS",
            _ => "OTHER",
        };
        self.requests.get_or_create(&Request { plane, route: route.to_owned(), method, status }).inc();
        self.seconds.get_or_create(&Route { plane, route: route.to_owned() }).observe(took.as_secs_f64());
    }

    /// Everything, ours and the node's, as text.
    pub(crate) fn encode(&self, stats: &Stats) -> Result<String, fmt::Error> {
        let mut text = String::with_capacity(16 << 10);
        encode_registry(&mut text, &self.registry)?;
        let mut node = Registry::with_prefix("aenv");
        node.register_collector(Box::new(Node(stats.clone())));
        encode_registry(&mut text, &node)?;
        encode_eof(&mut text)?;
        Ok(text)
    }
}

/// The node's numbers at one moment.
#[derive(Debug)]
struct Node(Stats);

impl Collector for Node {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let stats = &self.0;
        for (name, help, value) in [
            (
                "memory_promised_mebibytes",
                "Guest memory promised to running sandboxes",
                stats.memory_promised_mib,
            ),
            ("memory_limit_mebibytes", "Guest memory this node admits", stats.memory_limit_mib),
        ] {
            let gauge = ConstGauge::new(signed(value));
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        let states = stats.sandboxes.iter().map(|(state, count)| ((*state).to_owned(), *count)).collect();
        gauges(&mut encoder, "sandboxes", "Sandboxes by state", "state", states)?;
        gauges(
            &mut encoder,
            "warm_machines",
            "Machines waiting warm, by template",
            "template",
            merged(&stats.warm),
        )?;
        let mut ended = encoder.encode_descriptor(
            "sandboxes_ended",
            "Sandboxes ended since the node started, by cause",
            None,
            MetricType::Counter,
        )?;
        for (cause, count) in merged(&stats.ended) {
            ended.encode_family(&[("cause", cause)])?.encode_counter::<NoLabelSet, _, u64>(&count, None)?;
        }
        let mut phases = encoder.encode_descriptor(
            "phase_seconds",
            "Steps of operations on sandboxes",
            None,
            MetricType::Histogram,
        )?;
        for phase in &stats.phases {
            let labels = [("operation", phase.operation), ("phase", phase.phase)];
            // The node counts cumulatively; the encoder does that itself.
            let mut below = 0;
            let mut buckets: Vec<_> = phase
                .buckets
                .iter()
                .filter(|(bound, _)| bound.is_finite() && *bound < f64::MAX)
                .map(|&(bound, cumulative)| {
                    let here = cumulative.saturating_sub(below);
                    below = cumulative.max(below);
                    (bound, here)
                })
                .collect();
            buckets.push((f64::INFINITY, phase.count.saturating_sub(below)));
            phases.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                phase.sum,
                phase.count,
                &buckets,
                None,
            )?;
        }
        Ok(())
    }
}

/// Twice the same label would make the whole text unreadable to a scraper.
fn merged(pairs: &[(String, u64)]) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for (name, count) in pairs {
        *sums.entry(name.clone()).or_default() += count;
    }
    sums
}

fn gauges(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &str,
    values: BTreeMap<String, u64>,
) -> Result<(), fmt::Error> {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (value, count) in values {
        family.encode_family(&[(label, value)])?.encode_gauge(&signed(count))?;
    }
    Ok(())
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aenv_node::control::PhaseHistogram;

    #[test]
    fn the_nodes_histograms_keep_their_counts() {
        let stats = Stats {
            sandboxes: vec![("running", 3)],
            ended: vec![("killed".into(), 2), ("killed".into(), 1)],
            phases: vec![PhaseHistogram {
                operation: "create",
                phase: "restore",
                buckets: vec![(0.1, 4), (1.0, 6)],
                sum: 3.5,
                count: 7,
            }],
            ..Stats::default()
        };
        let text = Metrics::new().encode(&stats).unwrap();
        for line in [
            "aenv_sandboxes{state=\"running\"} 3",
            "aenv_sandboxes_ended_total{cause=\"killed\"} 3",
            "aenv_phase_seconds_bucket{le=\"0.1\",operation=\"create\",phase=\"restore\"} 4",
            "aenv_phase_seconds_bucket{le=\"1.0\",operation=\"create\",phase=\"restore\"} 6",
            "aenv_phase_seconds_bucket{le=\"+Inf\",operation=\"create\",phase=\"restore\"} 7",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn made_up_methods_do_not_make_new_series() {
        let metrics = Metrics::new();
        for name in ["BREW", "FOO", "BAR"] {
            let method = Method::from_bytes(name.as_bytes()).unwrap();
            metrics.answered("control", "unmatched", &method, 405, Duration::from_millis(1));
        }
        let text = metrics.encode(&Stats::default()).unwrap();
        assert!(text.contains("method=\"OTHER\",status=\"405\"} 3"), "{text}");
    }
}
