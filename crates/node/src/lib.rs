//! Sandbox state machine, driver, orchestration, pools, templates.
